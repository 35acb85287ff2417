"""The engine's side of canaryd: begin, end, snapshot. Never blocks the engine and never raises into it.

A client works the same with and without a daemon: a thread of its own connects for ever at low cost, and the engine
only ever takes one short lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Literal

import msgspec

import canaryd
from canaryd.client.facts import Final, SnapshotState, Status
from canaryd.client.memory import ExportedMemory
from canaryd.client.ops import Event, FinalSource, Ops
from canaryd.client.sender import Sender, Timing
from canaryd.client.stream import Stream
from canaryd.wire.messages import Attach, Finding, GroupSpec, HostShmMemory, Identity, Memory, PageSet
from canaryd.wire.validate import validate

logger = logging.getLogger("canaryd.client")

NO_OP = 0
"""Op id of a client that is off; `end` ignores it."""

QUEUE_LIMIT = 4096
QUEUE_LIMIT_BYTES = 64 * 1024 * 1024
CLOSE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ClientStats:
    """What a client did so far.

    `state`: "searching", "greeting", "attaching", "attached", "refused", "off" or "closed". `engine_seconds`: time
    of the engine's threads spent in begin, end, end_after and in telling finals, snapshots included. `sent`: messages
    handed to the socket. `dropped`: messages lost because the queue was full or they could not be encoded; each shows
    as a gap. `rejected`: messages that the daemon did not accept. `findings`, `findings_dropped`: findings that came,
    and those lost because nobody polled. `errors`: at the first the client turns itself off.
    """

    state: str
    sent: int
    dropped: int
    rejected: int
    attaches: int
    snapshots: int
    errors: int
    engine_seconds: float
    findings: int
    findings_dropped: int

    @property
    def reattaches(self) -> int:
        """Attachments after the first."""
        return max(0, self.attaches - 1)


class Client:
    """One rank's client.

    Args:
        socket_dir: directory of the daemon's sockets; need not exist yet.
        identity, engine_kind, engine_version, model, groups, frees, tiers, scheme: as in `Attach`.
        memory: exported pools, in the order in which regions number them; the client's to close from now on.
        snapshot: gives rows and cached pages when the daemon asks. Called on the engine's thread inside `begin`, or
            on the client's thread while no op is open and the engine has made no call for 50 ms. Must be quick.
        queue_limit: most messages that wait for the daemon; more are dropped and cost a snapshot.
        timing: intervals of the sender's thread.

    Raises WireError if the description contradicts itself. After construction nothing raises.
    """

    def __init__(
        self,
        *,
        socket_dir: str | os.PathLike[str],
        identity: Identity,
        engine_kind: str,
        engine_version: str,
        groups: Sequence[GroupSpec],
        memory: Sequence[ExportedMemory],
        frees: bool,
        tiers: Literal["none", "announced", "opaque"],
        snapshot: Callable[[], SnapshotState],
        model: str = "",
        scheme: Literal["native", "sglang"] | None = None,
        queue_limit: int = QUEUE_LIMIT,
        timing: Timing | None = None,
    ) -> None:
        self._memory = tuple(memory)
        memories, fds = _number_descriptors(self._memory)
        attach = Attach(
            identity=identity,
            engine_kind=engine_kind,
            engine_version=engine_version,
            client_version=canaryd.__version__,
            memories=memories,
            groups=list(groups),
            model=model,
            scheme=scheme,
            frees=frees,
            tiers=tiers,
        )
        validate(attach)
        timing = timing or Timing()
        stream = Stream(limit=queue_limit, limit_bytes=QUEUE_LIMIT_BYTES)
        self._ops = Ops(stream, snapshot, idle_seconds=timing.idle_seconds)
        self._sender = Sender(self._ops, Path(socket_dir), attach, fds, timing, on_error=self._fail)
        self._off = False
        self._closed = False
        self._errors = 0
        _clients.add(self)

    def start(self) -> None:
        """Start the thread that talks to the daemon. Calls before it are tracked but reach nobody."""
        if self._off:
            return
        try:
            self._sender.start()
        except RuntimeError as error:  # no more threads, or started twice
            self._fail("start", error)

    def begin(self, lane: str = "main", scope: Sequence[PageSet] | None = None) -> int:
        """An op that may write the pool begins; call it *before* anything is written.

        Args:
            lane: the stream that the op runs on; ops of one lane end in the order in which they were ended here.
            scope: the pages it may write; None: any.

        Returns the op's id, `NO_OP` if the client is off.
        """
        if self._off:
            return NO_OP
        started = perf_counter_ns()
        try:
            op = self._ops.begin(lane, scope, started)
        except Exception as error:  # noqa: BLE001 - the promise to the engine: nothing raises; counted and logged
            self._fail("begin", error)
            return NO_OP
        self._ops.engine_ns += perf_counter_ns() - started
        return op

    def end(self, op: int, status: Status = "done", final: Final | None = None) -> None:
        """The op's last write is complete. `final` names what it wrote and how rows changed."""
        if self._off or op == NO_OP:
            return
        started = perf_counter_ns()
        try:
            self._ops.end(op, status, final, started)
        except Exception as error:  # noqa: BLE001 - as in begin
            self._fail("end", error)
            return
        self._ops.engine_ns += perf_counter_ns() - started

    def end_after(self, op: int, events: Sequence[Event], final: FinalSource = None, status: Status = "done") -> None:
        """The op's last write is complete when all events are; the client's thread polls them.

        A callable `final` is called once, on the client's thread, after the events are done, with or without a
        daemon (but not if the client went off or was closed before).
        """
        if self._off or op == NO_OP:
            return
        started = perf_counter_ns()
        try:
            self._ops.end_after(op, events, status, final, started)
        except Exception as error:  # noqa: BLE001 - as in begin
            self._fail("end_after", error)
            return
        self._ops.engine_ns += perf_counter_ns() - started

    def poll_findings(self) -> list[Finding]:
        """Findings about this pool since the last call, oldest first; never blocks.

        An engine calls it between steps, to end the readers of a damaged slot. At most 256 wait, the newest.
        """
        return self._sender.findings.take()

    def open_ops(self) -> frozenset[int]:
        """Ops begun whose end is not yet in the stream; a snapshot provider leaves out what their ends will tell."""
        return self._ops.open_ops()

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Send what is queued, for at most `timeout` seconds, and end the session. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._ops.seal_session()  # before any call is ignored
        self._off = True
        self._sender.stop(timeout)
        for memory in self._memory:
            memory.close()

    @property
    def stats(self) -> ClientStats:
        """What the client did so far."""
        state = "closed" if self._closed else "off" if self._off else self._sender.state
        return ClientStats(
            state=state,
            sent=self._sender.sent,
            dropped=self._ops.stream.dropped + self._sender.dropped,
            rejected=self._sender.rejected,
            attaches=self._sender.attaches,
            snapshots=self._ops.snapshots,
            errors=self._errors,
            engine_seconds=self._ops.engine_ns / 1e9,
            findings=self._sender.findings.received,
            findings_dropped=self._sender.findings.dropped,
        )

    def _fail(self, where: str, error: Exception) -> None:
        """Count an internal error, say so once, and leave the engine alone from now on."""
        self._errors += 1
        if self._off:
            return
        self._ops.seal_session()  # before any call is ignored, this one included
        self._off = True
        self._sender.request_stop()
        logger.error("canaryd's client is off, the engine is not affected: error in %s", where, exc_info=error)

    def _off_in_child(self) -> None:
        """After a fork: the thread is not here, and the side connection must not outlive the parent through us."""
        self._off = True
        self._closed = True
        self._sender.abandon()
        for memory in self._memory:
            memory.close()


def _number_descriptors(memory: Sequence[ExportedMemory]) -> tuple[list[Memory], list[int]]:
    """Descriptions with descriptors numbered from 1 (0 is the announce page), and the descriptors in that order."""
    memories: list[Memory] = []
    fds: list[int] = []
    for exported in memory:
        described = exported.memory
        if isinstance(described, HostShmMemory):
            if exported.fd is None:
                raise ValueError("exported host memory was closed before it was attached")
            fds.append(exported.fd)
            described = msgspec.structs.replace(described, fd_index=len(fds))
        memories.append(described)
    return memories, fds


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._off_in_child()


def _at_exit() -> None:
    for client in list(_clients):
        client.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)

"""Open ops, pending ends and snapshots: all of the client's state, behind one short lock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec.structs import replace

from canaryd.client.facts import Final, SnapshotState, column, page_set, row_open
from canaryd.client.stream import Stream, StreamMessage
from canaryd.wire import limits
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.messages import Begin, Copies, End, PageSet, Remap, RowOpen, Snapshot, Writes

Status = Literal["done", "failed", "aborted"]
_STATUSES = ("done", "failed", "aborted")
_MESSAGE_BYTES = 256
"""About what a queued message costs besides its columns."""


class Event(Protocol):
    """Something behind which GPU work is complete, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the work is complete. Called on the sender's thread; must not block."""
        ...


FinalSource = Final | Callable[[], Final] | None


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """An end that waits for the GPU: `final` is a message already, or a callable resolved when the events are done."""

    op: int
    events: tuple[Event, ...]
    final: tuple[End, int] | Callable[[], Final]
    status: Status


class Ops:
    """State of one client. Methods raise for bad arguments; the client turns that into switching itself off.

    Args:
        stream: numbers and queues the messages.
        snapshot: gives the engine's rows and cached pages. Called with the lock held, on the engine's thread at a
            `begin`, or on the sender's thread when no op is open and the engine is idle.
        idle_seconds: how long the engine must be silent before the sender's thread takes the snapshot.
    """

    def __init__(self, stream: Stream, snapshot: Callable[[], SnapshotState], *, idle_seconds: float) -> None:
        # reentrant: a snapshot provider that calls the client must not deadlock the engine
        self.lock = threading.RLock()
        self.stream = stream
        self.engine_ns = 0
        """Nanoseconds of the engine's threads spent in the client."""
        self.snapshots = 0
        self._snapshot = snapshot
        self._idle_seconds = idle_seconds
        self._last_op = 0
        self._open: dict[int, Begin] = {}
        self._pending: dict[str, deque[_Pending]] = {}
        self._ending: set[int] = set()
        self._snapshot_wanted = False
        self._last_call = 0.0

    def begin(self, lane: str, scope: Sequence[PageSet] | None) -> int:
        """Open an op; a snapshot that is wanted goes out before it."""
        pages = None if scope is None else [_page_set(entry) for entry in scope]
        if not isinstance(lane, str):
            raise TypeError(f"a lane is named by a string, got {type(lane).__name__}")
        with self.lock:
            self._last_call = time.monotonic()
            if self._snapshot_wanted:
                self._put_snapshot()
            if len(self._open) >= limits.MAX_OPEN_OPS:
                raise RuntimeError(f"{limits.MAX_OPEN_OPS} ops are open: ops are begun and never ended")
            self._last_op += 1
            message = Begin(op=self._last_op, lane=lane, scope=pages)
            self._open[message.op] = message
            if self.stream.live:
                size = _MESSAGE_BYTES + (sum(len(entry.pages) for entry in pages) if pages else 0)
                self.stream.put(message, size)
            return message.op

    def end(self, op: int, status: Status, final: Final | None) -> None:
        """Close an op whose writes are complete, behind the pending ends of its lane."""
        message, size = _end_message(op, status, final)
        with self.lock:
            self._last_call = time.monotonic()
            waiting = self._pending.get(self._lane_of(op))
            if waiting:
                # facts of a lane apply in the order of its ops
                waiting.append(_Pending(op=op, events=(), final=(message, size), status=status))
                self._ending.add(op)
            else:
                self._close(message, size)

    def end_after(self, op: int, events: Sequence[Event], status: Status, final: FinalSource) -> None:
        """Close an op once every event is done; `poll` does it."""
        resolved = final if callable(final) else _end_message(op, status, final)
        pending = _Pending(op=op, events=tuple(events), final=resolved, status=status)
        with self.lock:
            self._last_call = time.monotonic()
            self._pending.setdefault(self._lane_of(op), deque()).append(pending)
            self._ending.add(op)

    def poll(self) -> None:
        """Send the ends whose events are done, in order within each lane. Sender's thread only."""
        with self.lock:
            lanes = list(self._pending.items())
        for lane, waiting in lanes:
            while waiting and all(event.query() for event in waiting[0].events):
                pending = waiting[0]
                if callable(pending.final):
                    # outside the lock: it may copy token ids from the GPU
                    message, size = _end_message(pending.op, pending.status, pending.final())
                else:
                    message, size = pending.final
                with self.lock:
                    waiting.popleft()
                    if not waiting:
                        del self._pending[lane]
                    self._ending.discard(message.op)
                    self._close(message, size)

    def open_ops(self) -> frozenset[int]:
        """Ops begun whose end is not yet in the stream."""
        with self.lock:
            return frozenset(self._open)

    def pending(self) -> bool:
        """Whether ends wait for their events."""
        return bool(self._pending)

    def want_snapshot(self) -> None:
        """Take a snapshot at the next `begin`, or when the engine is idle."""
        with self.lock:
            self._snapshot_wanted = True

    def snapshot_if_idle(self) -> None:
        """Take a wanted snapshot now if no op is open and the engine has been silent. Sender's thread."""
        if not self._snapshot_wanted:
            return
        with self.lock:
            idle = time.monotonic() - self._last_call >= self._idle_seconds
            if self._snapshot_wanted and idle and not self._open:
                self._put_snapshot()

    def open_session(self, page: AnnouncePage) -> None:
        """Messages have a reader from now on."""
        with self.lock:
            self._snapshot_wanted = False
            self.stream.open(page)

    def seal_session(self) -> None:
        """The engine's writes are no longer announced; what waits is still sent."""
        with self.lock:
            self.stream.seal()

    def close_session(self) -> None:
        """Messages have no reader any more; ops stay tracked."""
        with self.lock:
            self._snapshot_wanted = False
            self.stream.close()

    def drain(self, send: Callable[[int, StreamMessage], bool]) -> int:
        """Give waiting messages to `send` until there are none or it returns False; how many were taken."""
        taken = 0
        while True:
            with self.lock:
                head = self.stream.peek()
            if head is None or not send(*head):
                return taken
            with self.lock:
                self.stream.pop()
            taken += 1

    def _lane_of(self, op: int) -> str:
        begun = self._open.get(op)
        if begun is None:
            raise ValueError(f"op {op} is not open")
        if op in self._ending:
            raise ValueError(f"op {op} has been ended already and waits for its events")
        return begun.lane

    def _close(self, message: End, size: int) -> None:
        del self._open[message.op]
        if self.stream.live:
            self.stream.put(message, size)

    def _put_snapshot(self) -> None:
        self._snapshot_wanted = False
        if not self.stream.live:
            return
        state = self._snapshot()
        self.snapshots += 1
        rows = [_row_open(row) for row in state.rows]
        cached = [_page_set(entry) for entry in state.cached]
        size = _MESSAGE_BYTES + sum(len(row.pages) + len(row.ids) for row in rows)
        size += sum(len(entry.pages) for entry in cached)
        self.stream.put(Snapshot(open_ops=list(self._open.values()), rows=rows, cached=cached), size)


def _page_set(entry: PageSet) -> PageSet:
    return entry if type(entry.pages) is bytes else page_set(entry.group, entry.pages)


def _row_open(row: RowOpen) -> RowOpen:
    if type(row.pages) is bytes and type(row.ids) is bytes:
        return row
    return row_open(row.row, row.group, row.pages, row.length, namespace=row.namespace, ids=row.ids)


def _remap(remap: Remap) -> Remap:
    return remap if type(remap.pages) is bytes else replace(remap, pages=column(remap.pages))


def _writes(writes: Writes) -> Writes:
    if type(writes.counts) is type(writes.positions) is type(writes.tokens) is type(writes.slots) is bytes:
        return writes
    return replace(
        writes,
        counts=column(writes.counts),
        positions=column(writes.positions),
        tokens=column(writes.tokens),
        slots=column(writes.slots),
    )


def _copies(copies: Copies) -> Copies:
    if type(copies.sources) is bytes and type(copies.destinations) is bytes:
        return copies
    return replace(copies, sources=column(copies.sources), destinations=column(copies.destinations))


def _end_message(op: int, status: Status, final: Final | None) -> tuple[End, int]:
    """The message with columns copied, and about how many bytes it holds."""
    if status not in _STATUSES:
        raise ValueError(f"status must be one of {_STATUSES}, got {status!r}")
    if final is None:
        return End(op=op, status=status), _MESSAGE_BYTES
    size = _MESSAGE_BYTES
    # on the engine's thread, once per step, with most lists empty: each list is touched only if it holds something
    facts: dict[str, list[Any]] = {}
    if final.problem is not None:
        raise final.problem
    if final.closed:
        facts["closed"] = list(final.closed)
    if final.opened:
        facts["opened"] = [_row_open(row) for row in final.opened]
        size += sum(len(row.pages) + len(row.ids) for row in facts["opened"])
    if final.remaps:
        facts["remaps"] = [_remap(remap) for remap in final.remaps]
        size += sum(len(remap.pages) for remap in facts["remaps"])
    if final.writes:
        facts["writes"] = named = []
        for writes in final.writes:
            named.append(_writes(writes))
            size += 3 * len(named[-1].slots) + 64 * len(writes.rows)
    if final.copies:
        facts["copies"] = [_copies(copies) for copies in final.copies]
        size += sum(2 * len(copies.sources) for copies in facts["copies"])
    if final.voids:
        facts["voids"] = [_page_set(entry) for entry in final.voids]
        size += sum(len(entry.pages) for entry in facts["voids"])
    if final.freed:
        facts["freed"] = [_page_set(entry) for entry in final.freed]
        size += sum(len(entry.pages) for entry in facts["freed"])
    return End(op=op, status=status, **facts), size

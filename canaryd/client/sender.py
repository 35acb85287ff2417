"""The client's thread: connects for ever, sends what is queued, beats, and polls the events of pending ends."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from msgspec.structs import replace

from canaryd.client.inbox import Inbox
from canaryd.client.link import Link, LinkLost, LinkState
from canaryd.client.ops import Ops
from canaryd.client.stream import StreamMessage
from canaryd.errors import WireError
from canaryd.wire.messages import (
    Attach,
    Attached,
    Beat,
    Finding,
    Refused,
    Rejected,
    Resync,
    Snapshot,
    ToEngine,
    WhoAreYou,
)

logger = logging.getLogger("canaryd.client")

FINDINGS_LIMIT = 256


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Intervals of the client's thread, in seconds."""

    poll_seconds: float = 0.005
    """Between looks at what is queued and at events, while the engine is at work."""
    listen_seconds: float = 0.025
    """Between looks at what the daemon says, and at everything while the engine is idle."""
    beat_seconds: float = 0.1
    idle_seconds: float = 0.05
    """Silence of the engine after which it counts as idle."""
    retry_seconds: float = 0.5
    """Between attempts to find a daemon."""
    refused_retry_seconds: float = 5.0
    """Before a refused attachment is tried again."""
    greeting_seconds: float = 5.0
    attaching_seconds: float = 120.0
    """How long the daemon may take to answer; opening a pool takes a while on a busy GPU."""


class Sender:
    """Owns the thread and the link. Counters are read by `Client.stats`."""

    def __init__(
        self,
        ops: Ops,
        socket_dir: Path,
        attach: Attach,
        fds: Sequence[int],
        timing: Timing,
        *,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self._ops = ops
        self._socket_dir = socket_dir
        self._attach = attach
        self._fds = tuple(fds)
        self._timing = timing
        self._on_error = on_error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canaryd-client", daemon=True)
        self._link: Link | None = None
        self._retry_at = 0.0
        self._link_deadline = 0.0
        self._listen_at = 0.0
        self._beat_at = 0.0
        self._close_by = 0.0
        self._said = ""
        self.state = "searching"
        self.sent = 0
        self.dropped = 0
        self.findings = Inbox(FINDINGS_LIMIT)
        self.rejected = 0
        self.attaches = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def request_stop(self) -> None:
        """End the session soon, without waiting."""
        self._stop.set()

    def stop(self, timeout: float) -> None:
        """Send what is queued for at most `timeout` seconds, end the session and wait for the thread that long."""
        self._close_by = time.monotonic() + timeout
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # a little longer than the thread's own bound
            self._thread.join(timeout + 0.5)

    def abandon(self) -> None:
        """In a forked child: close our copies of the session's descriptors; ZeroMQ's belong to the parent's thread."""
        self._stop.set()
        link, self._link = self._link, None
        if link is not None:
            link.hang_up()
            link.page.close()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while not self._stop.is_set():
                self._ops.poll()
                self._turn(context, time.monotonic())
                self._wait()
        except Exception as error:  # noqa: BLE001 - a thread's end must be counted and said; the client goes off
            self._on_error("the sender", error)
        finally:
            self._finish(context)

    def _turn(self, context: zmq.Context[zmq.Socket[bytes]], now: float) -> None:
        if self._link is None:
            if now < self._retry_at:
                return
            self._connect(context, now)
        if self._link is not None:
            try:
                self._serve(self._link, now)
            except (LinkLost, WireError) as error:
                self._drop_session(now + self._timing.retry_seconds, f"The session is over: {error}.")

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], now: float) -> None:
        try:
            self._link = Link(context, self._socket_dir, self._attach, self._fds)
        except OSError as error:
            self._retry_at = now + self._timing.retry_seconds
            self._say(f"No daemon listens in {self._socket_dir} ({error.strerror or error}); looking for one.")
            return
        self.state = LinkState.GREETING
        self._link_deadline = now + self._timing.greeting_seconds

    def _serve(self, link: Link, now: float) -> None:
        # while the engine runs, each turn holds up its thread: a turn does what is due and nothing else
        if link.state is not LinkState.ATTACHED or now >= self._listen_at:
            self._listen_at = now + self._timing.listen_seconds
            self._listen(link, now)
            if self._link is None or link.state is LinkState.GREETING:
                return
            self._ops.snapshot_if_idle()
        self._ops.drain(functools.partial(self._send, link))
        if now >= self._beat_at:
            self._beat_at = now + self._timing.beat_seconds
            link.send(self._ops.stream.number, Beat(engine_ns=self._ops.engine_ns))

    def _listen(self, link: Link, now: float) -> None:
        before = link.state
        for answer in link.receive():
            self._handle(link, answer, now)
            if self._link is None:
                return
        if link.state is not before and link.state is LinkState.ATTACHING:
            self.state = LinkState.ATTACHING
            self._link_deadline = now + self._timing.attaching_seconds
        if link.state is not LinkState.ATTACHED and now >= self._link_deadline:
            raise LinkLost(f"the daemon did not answer while {link.state}")

    def _send(self, link: Link, number: int, message: StreamMessage) -> bool:
        try:
            sent = link.send(number, message)
        except WireError as error:
            if isinstance(message, Snapshot) and any(row.ids for row in message.rows):
                # known ids are a convenience: without them the snapshot may fit
                rows = [replace(row, ids=b"") for row in message.rows]
                return self._send(link, number, Snapshot(open_ops=message.open_ops, rows=rows, cached=message.cached))
            self.dropped += 1
            self._say(f"A message was dropped: {error}.", logging.WARNING)
            return True
        self.sent += sent
        return sent

    def _handle(self, link: Link, answer: ToEngine, now: float) -> None:
        match answer:
            case Attached():
                self._ops.open_session(link.page)
                self.attaches += 1
                self.state = LinkState.ATTACHED
                self._say(f"Attached; regions describe {answer.described_ratio:.1%} of the memory.")
            case Finding():
                self.findings.put(answer)
            case Resync():
                self._ops.want_snapshot()
            case Rejected():
                self.rejected += 1
                self._say(f"The daemon rejected a message as {answer.reason}: {answer.detail}", logging.WARNING)
            case WhoAreYou():
                self._drop_session(now + self._timing.poll_seconds, "The daemon does not know this session.")
            case Refused():
                why = f"Attachment refused: {answer.cause} {answer.remedy}"
                self._drop_session(now + self._timing.refused_retry_seconds, why, logging.WARNING)
                self.state = "refused"

    def _drop_session(self, retry_at: float, why: str, level: int = logging.INFO) -> None:
        link, self._link = self._link, None
        self._ops.close_session()
        if link is not None:
            link.close()
            link.hang_up()
        self._retry_at = retry_at
        self.state = "searching"
        self._say(why, level)

    def _say(self, text: str, level: int = logging.INFO) -> None:
        """Log a sentence once, until another one is due."""
        if text != self._said:
            self._said = text
            logger.log(level, "%s", text)

    def _wait(self) -> None:
        """Sleep until the next turn. The engine never wakes this thread: that would cost it a system call."""
        if self._link is None:
            self._stop.wait(self._timing.poll_seconds if self._ops.pending() else self._timing.beat_seconds)
        elif self._link.state is LinkState.ATTACHED and self._ops.quiet():
            self._stop.wait(self._timing.listen_seconds)
        else:
            time.sleep(self._timing.poll_seconds)

    def _finish(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Send what is queued within the time that `stop` gave, then end the session."""
        link, self._link = self._link, None
        if link is None:
            context.term()
            return
        try:
            if link.state is LinkState.ATTACHED:
                while len(self._ops.stream) and time.monotonic() < self._close_by:
                    if not self._ops.drain(functools.partial(self._send, link)):
                        time.sleep(self._timing.poll_seconds)
        finally:
            self._ops.close_session()
            left = max(0.0, self._close_by - time.monotonic())
            link.close(linger_ms=int(left * 1000))
            context.term()  # returns when the frames are out, or the linger time is over
            link.hang_up()

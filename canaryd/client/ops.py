"""Open ops, pending ends and snapshots: all of the client's state, behind one short lock."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from canaryd.client.facts import Fact, Final, SnapshotState, Status, end_message, page_set, row_open
from canaryd.client.stream import Stream, StreamMessage
from canaryd.wire import limits
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.messages import Begin, PageSet, RowOpen, Snapshot

_STATUSES = ("done", "failed", "aborted")
_MESSAGE_BYTES = 256
"""About what a queued message costs besides its facts."""


class Event(Protocol):
    """Something behind which GPU work is complete, such as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the work is complete. Called on the sender's thread; must not block."""
        ...


FinalSource = Final | Callable[[], Final] | None

_Told = tuple[tuple[Fact, ...], int]
"""The facts of an end, and about how many bytes its message holds."""


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """An end that waits for the GPU: `final` is what it tells, or a callable resolved when the events are done."""

    op: int
    events: tuple[Event, ...]
    final: _Told | Callable[[], Final]
    status: Status


class Ops:
    """State of one client. Methods raise for bad arguments; the client turns that into switching itself off.

    The engine's thread takes the lock once per call, and makes no message: `drain` does, on the sender's thread.

    Args:
        stream: numbers and queues the messages.
        snapshot: gives the engine's rows and cached pages. Called with the lock held, on the engine's thread at a
            `begin`, or on the sender's thread when no op is open and the engine is idle.
        idle_seconds: how long the engine must be silent before the sender's thread takes the snapshot.
    """

    __slots__ = (
        "_ending",
        "_idle_ns",
        "_last_call",
        "_last_op",
        "_open",
        "_pending",
        "_snapshot",
        "_snapshot_wanted",
        "engine_ns",
        "lock",
        "snapshots",
        "stream",
    )

    def __init__(self, stream: Stream, snapshot: Callable[[], SnapshotState], *, idle_seconds: float) -> None:
        # reentrant: a snapshot provider that calls the client must not deadlock the engine
        self.lock = threading.RLock()
        self.stream = stream
        self.engine_ns = 0
        """Nanoseconds of the engine's threads spent in the client."""
        self.snapshots = 0
        self._snapshot = snapshot
        self._idle_ns = int(idle_seconds * 1e9)
        self._last_op = 0
        self._open: dict[int, tuple[int, str, list[PageSet] | None]] = {}
        """What `begin_message` makes a message of, by op."""
        self._pending: dict[str, deque[_Pending]] = {}
        self._ending: set[int] = set()
        self._snapshot_wanted = False
        self._last_call = 0

    def begin(self, lane: str, scope: Sequence[PageSet] | None, now: int) -> int:
        """Open an op at `perf_counter_ns` `now`; a snapshot that is wanted goes out before it."""
        if not isinstance(lane, str):
            raise TypeError(f"a lane is named by a string, got {type(lane).__name__}")
        pages, size = None, _MESSAGE_BYTES
        if scope is not None:
            pages = [_page_set(entry) for entry in scope]
            size += sum(len(entry.pages) for entry in pages)
        with self.lock:
            self._last_call = now
            if self._snapshot_wanted:
                self._put_snapshot()
            if len(self._open) >= limits.MAX_OPEN_OPS:
                raise RuntimeError(f"{limits.MAX_OPEN_OPS} ops are open: ops are begun and never ended")
            op = self._last_op = self._last_op + 1
            begun = self._open[op] = (op, lane, pages)
            self.stream.put(size, begin_message, begun)
        return op

    def end(self, op: int, status: Status, final: Final | None, now: int) -> None:
        """Close an op whose writes are complete, behind the pending ends of its lane."""
        if status not in _STATUSES:
            raise ValueError(f"status must be one of {_STATUSES}, got {status!r}")
        facts, size = self._take(final)
        with self.lock:
            self._last_call = now
            if self._pending:
                waiting = self._pending.get(self._lane_of(op))
                if waiting:
                    # facts of a lane apply in the order of its ops
                    waiting.append(_Pending(op=op, events=(), final=(facts, size), status=status))
                    self._ending.add(op)
                    return
            self._close(op, status, facts, size)

    def end_after(self, op: int, events: Sequence[Event], status: Status, final: FinalSource, now: int) -> None:
        """Close an op once every event is done; `poll` does it."""
        if status not in _STATUSES:
            raise ValueError(f"status must be one of {_STATUSES}, got {status!r}")
        resolved = final if callable(final) else self._take(final)
        pending = _Pending(op=op, events=tuple(events), final=resolved, status=status)
        with self.lock:
            self._last_call = now
            self._pending.setdefault(self._lane_of(op), deque()).append(pending)
            self._ending.add(op)

    def poll(self) -> None:
        """Send the ends whose events are done, in order within each lane. Sender's thread only."""
        if not self._pending:
            return
        with self.lock:
            lanes = list(self._pending.items())
        for lane, waiting in lanes:
            while waiting and all(event.query() for event in waiting[0].events):
                pending = waiting[0]
                # outside the lock: it may copy token ids from the GPU
                facts, size = _told(pending.final()) if callable(pending.final) else pending.final
                with self.lock:
                    waiting.popleft()
                    if not waiting:
                        del self._pending[lane]
                    self._ending.discard(pending.op)
                    self._close(pending.op, pending.status, facts, size)

    def open_ops(self) -> frozenset[int]:
        """Ops begun whose end is not yet in the stream."""
        with self.lock:
            return frozenset(self._open)

    def pending(self) -> bool:
        """Whether ends wait for their events."""
        return bool(self._pending)

    def quiet(self) -> bool:
        """Whether the engine has been silent for a while, and nothing waits to be sent or for an event."""
        if self._pending or len(self.stream):
            return False
        return time.perf_counter_ns() - self._last_call >= self._idle_ns

    def want_snapshot(self) -> None:
        """Take a snapshot at the next `begin`, or when the engine is idle."""
        with self.lock:
            self._snapshot_wanted = True

    def snapshot_if_idle(self) -> None:
        """Take a wanted snapshot now if no op is open and the engine has been silent. Sender's thread."""
        if not self._snapshot_wanted:
            return
        with self.lock:
            idle = time.perf_counter_ns() - self._last_call >= self._idle_ns
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
        """Make waiting messages and give them to `send` until there are none or it returns False; how many were taken.

        Raises what `column` raises for a fact that cannot be told; its message stays where it is.
        """
        taken = 0
        while True:
            with self.lock:
                head = self.stream.peek()
            if head is None:
                return taken
            number, make, args = head
            if not send(number, make(*args)):
                return taken
            with self.lock:
                self.stream.pop()
            taken += 1

    def _take(self, final: Final | None) -> _Told:
        """What the engine's thread told, and how long that took it."""
        if final is not None:
            self.engine_ns += final.engine_ns
            final.engine_ns = 0
        return _told(final)

    def _lane_of(self, op: int) -> str:
        begun = self._open.get(op)
        if begun is None:
            raise ValueError(f"op {op} is not open")
        if op in self._ending:
            raise ValueError(f"op {op} has been ended already and waits for its events")
        return begun[1]

    def _close(self, op: int, status: Status, facts: tuple[Fact, ...], size: int) -> None:
        if self._open.pop(op, None) is None:
            raise ValueError(f"op {op} is not open")
        self.stream.put(size, end_message, (op, status, facts))

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
        begun = [begin_message(*entry) for entry in self._open.values()]
        self.stream.put(size, _snapshot_message, (begun, rows, cached))


def begin_message(op: int, lane: str, scope: list[PageSet] | None) -> Begin:
    """The message of an op's begin."""
    return Begin(op=op, lane=lane, scope=scope)


def _snapshot_message(open_ops: list[Begin], rows: list[RowOpen], cached: list[PageSet]) -> Snapshot:
    return Snapshot(open_ops=open_ops, rows=rows, cached=cached)


def _told(final: Final | None) -> _Told:
    """What an end tells; later changes of `final` are not seen. Raises the problem that telling met."""
    if final is None:
        return (), _MESSAGE_BYTES
    if final.problem is not None:
        raise final.problem
    return tuple(final.facts), _MESSAGE_BYTES + final.size


def _page_set(entry: PageSet) -> PageSet:
    return entry if type(entry.pages) is bytes else page_set(entry.group, entry.pages)


def _row_open(row: RowOpen) -> RowOpen:
    if type(row.pages) is bytes and type(row.ids) is bytes:
        return row
    return row_open(row.row, row.group, row.pages, row.length, namespace=row.namespace, ids=row.ids)

"""The ordered stream of one session: numbers, the announce page and the bounded queue.

The order of three steps is the whole point: a message gets its number, the announce page is raised to it, and only
then is the message queued. Whoever reads the page after a burst therefore knows of every message that could describe
a write before that moment, wherever the message is stuck. Before a session falls silent, the page is raised to a
number that no message will ever have: the daemon may learn late of the end, and must not judge by a page that the
engine no longer raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from canaryd.wire.announce import AnnouncePage
from canaryd.wire.limits import MAX_SEQUENCE
from canaryd.wire.messages import Begin, End, Snapshot

StreamMessage = Begin | End | Snapshot


class Stream:
    """Numbers and queues the messages of one session. Every method wants the client's lock to be held.

    What is queued is not the message but how to make it, so that the engine's thread need not.

    Args:
        limit: most messages that wait in the queue.
        limit_bytes: most bytes of columns that wait in the queue.
    """

    __slots__ = ("_cell", "_limit", "_limit_bytes", "_page", "_queue", "_queued_bytes", "_sealed", "dropped", "number")

    def __init__(self, *, limit: int, limit_bytes: int) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._queue: deque[tuple[int, int, Callable[..., StreamMessage], tuple[Any, ...]]] = deque()
        self._queued_bytes = 0
        self._page: AnnouncePage | None = None
        self._cell: memoryview | None = None
        self._sealed = False
        self.number = 0
        """Number of the last message of this session, sent or dropped."""
        self.dropped = 0
        """Messages dropped because the queue was full, of all sessions."""

    def open(self, page: AnnouncePage) -> None:
        """A session begins: numbers restart, what an older session left is discarded."""
        self.close()
        self._page = page
        self._cell = page.cell

    def seal(self) -> None:
        """Writes are no longer announced from here on: nothing that is read after this moment will be judged. What
        waits, and ends that are put, are still sent."""
        if self._page is not None:
            self._page.raise_to(MAX_SEQUENCE)
            self._sealed = True

    def close(self) -> None:
        """The session is over."""
        self.seal()
        self._page = self._cell = None
        self._sealed = False
        self._queue.clear()
        self._queued_bytes = 0
        self.number = 0

    @property
    def live(self) -> bool:
        """Whether a session stands: messages put now have a reader."""
        return self._page is not None

    def put(self, size: int, make: Callable[..., StreamMessage], args: tuple[Any, ...]) -> None:
        """Number, announce, then queue the message `make(*args)`, which holds about `size` bytes.

        It is dropped if the queue is full, and if no session stands.
        """
        cell = self._cell
        if cell is None:
            return
        number = self.number = self.number + 1
        if not self._sealed:
            cell[0] = number
        if len(self._queue) >= self._limit or self._queued_bytes + size > self._limit_bytes:
            # its number is used up: the reader sees the gap and asks for a snapshot
            self.dropped += 1
            return
        self._queued_bytes += size
        self._queue.append((number, size, make, args))

    def peek(self) -> tuple[int, Callable[..., StreamMessage], tuple[Any, ...]] | None:
        """The oldest waiting message: its number, and how to make it."""
        if not self._queue:
            return None
        number, _, make, args = self._queue[0]
        return number, make, args

    def pop(self) -> None:
        """Remove the message that `peek` showed."""
        _, size, _, _ = self._queue.popleft()
        self._queued_bytes -= size

    def __len__(self) -> int:
        return len(self._queue)

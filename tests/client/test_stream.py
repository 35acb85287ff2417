"""The order that the whole design rests on: number, announce, enqueue; and gaps on a full queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from canaryd.client.ops import begin_message
from canaryd.client.stream import Stream
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.limits import MAX_SEQUENCE
from canaryd.wire.messages import Begin


def put(stream: Stream, op: int, size: int) -> None:
    stream.put(size, begin_message, (op, "main", None))


def peek(stream: Stream) -> tuple[int, Begin] | None:
    head = stream.peek()
    if head is None:
        return None
    number, make, args = head
    message = make(*args)
    assert isinstance(message, Begin)
    return number, message


class WatchedQueue(deque[Any]):
    """Looks at the announce page at the moment in which a message becomes visible."""

    def __init__(self, page: AnnouncePage) -> None:
        super().__init__()
        self._page = page
        self.announced: list[tuple[int, int]] = []

    def append(self, item: Any) -> None:
        self.announced.append((item[0], self._page.read()))
        super().append(item)


@pytest.fixture
def page() -> Iterator[AnnouncePage]:
    page = AnnouncePage.create()
    yield page
    page.close()


def test_page_is_raised_before_the_message_is_visible(page: AnnouncePage) -> None:
    stream = Stream(limit=10, limit_bytes=1000)
    stream.open(page)
    queue = WatchedQueue(page)
    stream._queue = queue
    for op in range(1, 6):
        put(stream, op, 8)
    assert queue.announced == [(number, number) for number in range(1, 6)]


@pytest.mark.parametrize(("limit", "limit_bytes"), [(3, 1000), (100, 30)])
def test_full_queue_shows_as_a_gap(page: AnnouncePage, limit: int, limit_bytes: int) -> None:
    stream = Stream(limit=limit, limit_bytes=limit_bytes)
    stream.open(page)
    for op in range(1, 6):
        put(stream, op, 10)
    assert (len(stream), stream.dropped, stream.number, page.read()) == (3, 2, 5, 5)
    assert peek(stream) == (1, Begin(op=1))
    stream.pop()
    put(stream, 6, 10)
    numbers = []
    while (head := peek(stream)) is not None:
        numbers.append(head[0])
        stream.pop()
    assert numbers == [2, 3, 6]
    put(stream, 7, 10)
    assert peek(stream) == (7, Begin(op=7))


def test_sessions_start_from_one_and_discard_what_waits(page: AnnouncePage) -> None:
    stream = Stream(limit=10, limit_bytes=1000)
    put(stream, 1, 8)
    assert not stream.live
    assert peek(stream) is None
    stream.open(page)
    put(stream, 2, 900)
    other = AnnouncePage.create()
    stream.open(other)
    assert peek(stream) is None
    put(stream, 3, 900)
    assert peek(stream) == (1, Begin(op=3))
    assert other.read() == 1
    other.close()


def test_a_sealed_page_is_out_of_reach_and_what_waits_is_still_sent(page: AnnouncePage) -> None:
    stream = Stream(limit=10, limit_bytes=1000)
    stream.open(page)
    put(stream, 1, 8)
    stream.seal()
    put(stream, 2, 8)
    assert (len(stream), stream.number, page.read()) == (2, 2, MAX_SEQUENCE)
    other = AnnouncePage.create()
    stream.open(other)
    put(stream, 3, 8)
    assert (peek(stream), other.read()) == ((1, Begin(op=3)), 1)
    stream.close()
    assert other.read() == MAX_SEQUENCE
    other.close()

"""Open ops, ends that wait for events, and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from canaryd.client import Final, SnapshotState, column, page_set, row_open
from canaryd.client.ops import Ops
from canaryd.client.stream import Stream
from canaryd.wire import limits
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.framing import encode
from canaryd.wire.messages import Begin, Copies, End, PageSet, Remap, RowOpen, Snapshot, Writes
from canaryd.wire.validate import validate


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Engine:
    """Ops over a live stream, and what came out of it."""

    def __init__(self, page: AnnouncePage, idle_seconds: float = 0.0) -> None:
        self.state = SnapshotState()
        self.asked = 0
        self.stream = Stream(limit=10_000, limit_bytes=1 << 30)
        self.ops = Ops(self.stream, self.snapshot, idle_seconds=idle_seconds)
        self.ops.open_session(page)
        self.sent: list[Any] = []

    def snapshot(self) -> SnapshotState:
        self.asked += 1
        return self.state

    def take(self) -> list[Any]:
        taken: list[Any] = []

        def send(number: int, message: Any) -> bool:
            validate(message)
            encode(bytes(16), number, message)
            taken.append(message)
            return True

        self.ops.drain(send)
        return taken


@pytest.fixture
def page() -> Iterator[AnnouncePage]:
    page = AnnouncePage.create()
    yield page
    page.close()


@pytest.fixture
def engine(page: AnnouncePage) -> Engine:
    return Engine(page)


def test_end_carries_all_facts_in_wire_form(engine: Engine) -> None:
    op = engine.ops.begin("load", [page_set(0, [4, 5])])
    final = Final()
    final.close("a")
    final.open("b", 0, [1, 2], 5, namespace=7, ids=[10, 11])
    final.remap("b", 0, 1, [3])
    final.void(0, [3])
    final.write(1, ["b", "c"], [1, 2], [5, 0, 1], [9, 8, 7], [20, 21, 22])
    final.copy(0, [1], [2])
    final.free(0, [6])
    engine.ops.end(op, "failed", final)
    begin, end = engine.take()
    assert begin == Begin(op=op, lane="load", scope=[PageSet(group=0, pages=column([4, 5]))])
    assert end == End(
        op=op,
        status="failed",
        closed=["a"],
        opened=[RowOpen(row="b", group=0, pages=column([1, 2]), length=5, namespace=7, ids=column([10, 11]))],
        remaps=[Remap(row="b", group=0, start=1, pages=column([3]))],
        voids=[PageSet(group=0, pages=column([3]))],
        writes=[
            Writes(
                group=1,
                rows=["b", "c"],
                counts=column([1, 2]),
                positions=column([5, 0, 1]),
                tokens=column([9, 8, 7]),
                slots=column([20, 21, 22]),
            )
        ],
        copies=[Copies(group=0, sources=column([1]), destinations=column([2]))],
        freed=[PageSet(group=0, pages=column([6]))],
    )


def test_wire_structs_with_other_integers_are_converted(engine: Engine) -> None:
    raw: Any = [1, 2]
    final = Final(
        opened=[RowOpen(row="b", group=0, pages=raw, length=1, ids=raw)],
        remaps=[Remap(row="b", group=0, start=0, pages=raw)],
        voids=[PageSet(group=0, pages=raw)],
        writes=[Writes(group=0, rows=["b"], counts=[2], positions=raw, tokens=raw, slots=raw)],  # type: ignore[arg-type]
        copies=[Copies(group=0, sources=raw, destinations=raw)],
        freed=[PageSet(group=0, pages=raw)],
    )
    engine.ops.end(engine.ops.begin("main", [PageSet(group=0, pages=raw)]), "done", final)
    raw[:] = [7, 7]
    begin, end = engine.take()
    assert begin.scope[0].pages == end.opened[0].ids == end.remaps[0].pages == column([1, 2])
    assert end.voids[0].pages == end.writes[0].slots == end.copies[0].sources == end.freed[0].pages == column([1, 2])


def test_end_waits_for_every_event(engine: Engine) -> None:
    events = [Event(), Event()]
    resolved: list[int] = []

    def final() -> Final:
        resolved.append(1)
        return Final(closed=["r"])

    op = engine.ops.begin("main", None)
    engine.ops.end_after(op, events, "done", final)
    engine.take()
    for event in events:
        engine.ops.poll()
        assert engine.take() == []
        assert resolved == []
        event.done = True
    assert engine.ops.pending()
    engine.ops.poll()
    engine.ops.poll()
    assert engine.take() == [End(op=op, closed=["r"])]
    assert resolved == [1]
    assert not engine.ops.pending()


def test_ends_of_a_lane_keep_their_order(engine: Engine) -> None:
    first, second, third, other = (engine.ops.begin(lane, None) for lane in ("main", "main", "main", "load"))
    engine.take()
    events = [Event(), Event(), Event()]
    engine.ops.end_after(first, [events[0]], "done", None)
    engine.ops.end_after(second, [events[1]], "done", None)
    engine.ops.end(third, "done", None)
    engine.ops.end_after(other, [events[2]], "done", None)
    events[1].done = True
    engine.ops.poll()
    assert engine.take() == []
    events[2].done = True
    engine.ops.poll()
    assert [end.op for end in engine.take()] == [other]
    events[0].done = True
    engine.ops.poll()
    assert [end.op for end in engine.take()] == [first, second, third]


def test_snapshot_goes_out_before_the_next_op_with_open_ops(engine: Engine) -> None:
    open_op = engine.ops.begin("load", [page_set(0, [1])])
    waiting = engine.ops.begin("main", None)
    engine.ops.end_after(waiting, [Event()], "done", None)
    engine.take()
    engine.state = SnapshotState(rows=[row_open("r", 0, [1], 3)], cached=[page_set(0, [2])])
    engine.ops.want_snapshot()
    engine.ops.snapshot_if_idle()
    assert engine.asked == 0, "ops are open"
    op = engine.ops.begin("main", None)
    engine.ops.begin("main", None)
    snapshot, begin, _ = engine.take()
    assert isinstance(snapshot, Snapshot)
    assert [entry.op for entry in snapshot.open_ops] == [open_op, waiting]
    assert snapshot.open_ops[0].scope == [page_set(0, [1])]
    assert (snapshot.rows, snapshot.cached) == (engine.state.rows, engine.state.cached)
    assert begin == Begin(op=op)
    assert engine.asked == engine.ops.snapshots == 1


def test_snapshot_of_an_idle_engine_is_taken_by_the_sender(engine: Engine) -> None:
    engine.ops.snapshot_if_idle()
    assert engine.asked == 0
    engine.ops.want_snapshot()
    engine.ops.snapshot_if_idle()
    engine.ops.snapshot_if_idle()
    assert engine.asked == 1
    assert engine.take() == [Snapshot(open_ops=[], rows=[], cached=[])]


def test_busy_engine_is_not_asked_by_the_sender(page: AnnouncePage) -> None:
    engine = Engine(page, idle_seconds=3600)
    engine.ops.end(engine.ops.begin("main", None), "done", None)
    engine.ops.want_snapshot()
    engine.ops.snapshot_if_idle()
    assert engine.asked == 0


def test_ops_are_tracked_without_a_session(page: AnnouncePage) -> None:
    engine = Engine(page)
    engine.ops.close_session()
    kept, ended = engine.ops.begin("main", None), engine.ops.begin("main", None)
    engine.ops.end(ended, "done", None)
    engine.ops.want_snapshot()
    assert engine.take() == []
    fresh = AnnouncePage.create()
    engine.ops.open_session(fresh)
    engine.ops.want_snapshot()
    engine.ops.begin("main", None)
    snapshot, _ = engine.take()
    assert [entry.op for entry in snapshot.open_ops] == [kept]
    assert fresh.read() == 2
    fresh.close()


def test_provider_that_calls_back_does_not_deadlock(page: AnnouncePage) -> None:
    engine = Engine(page)
    engine.ops._snapshot = lambda: (engine.ops.begin("main", None), SnapshotState())[1]
    engine.ops.want_snapshot()
    engine.ops.begin("main", None)
    assert len(engine.take()) == 3


def told(tell: Callable[[Final], None]) -> Final:
    final = Final()
    tell(final)
    return final


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda ops, op: ops.begin(7, None), TypeError),
        (lambda ops, op: ops.begin("main", [3]), AttributeError),
        (lambda ops, op: ops.end(op + 1, "done", None), ValueError),
        (lambda ops, op: ops.end(op, "finished", None), ValueError),
        (lambda ops, op: ops.end(op, "done", 3), AttributeError),
        (lambda ops, op: ops.end(op, "done", told(lambda final: final.free(0, None))), TypeError),
        (lambda ops, op: ops.end_after(op, 3, "done", None), TypeError),
        (lambda ops, op: ops.end_after(99, [], "done", None), ValueError),
    ],
)
def test_bad_calls_raise_here_and_send_nothing(call: Any, error: type[Exception], engine: Engine) -> None:
    op = engine.ops.begin("main", None)
    engine.take()
    with pytest.raises(error):
        call(engine.ops, op)
    assert engine.take() == []


def test_open_ops_are_bounded(engine: Engine) -> None:
    for _ in range(limits.MAX_OPEN_OPS):
        engine.ops.begin("main", None)
    with pytest.raises(RuntimeError, match="never ended"):
        engine.ops.begin("main", None)


def test_ending_twice_is_an_error(engine: Engine) -> None:
    op = engine.ops.begin("main", None)
    engine.ops.end(op, "done", None)
    with pytest.raises(ValueError, match="not open"):
        engine.ops.end(op, "done", None)
    waiting = engine.ops.begin("main", None)
    engine.ops.end_after(waiting, [Event()], "done", None)
    with pytest.raises(ValueError, match="already"):
        engine.ops.end(waiting, "done", None)

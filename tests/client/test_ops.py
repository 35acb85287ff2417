"""Open ops, ends that wait for events, and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns
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


def told(tell: Callable[[Final], None]) -> Final:
    final = Final()
    tell(final)
    return final


class Event:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Engine:
    """Ops over a live stream, and what came out of it. Calls are made now."""

    def __init__(self, page: AnnouncePage, idle_seconds: float = 0.0) -> None:
        self.state = SnapshotState()
        self.asked = 0
        self.stream = Stream(limit=10_000, limit_bytes=1 << 30)
        self.ops = Ops(self.stream, self.snapshot, idle_seconds=idle_seconds)
        self.ops.open_session(page)
        self.sent: list[Any] = []

    def begin(self, lane: Any = "main", scope: Any = None) -> int:
        return self.ops.begin(lane, scope, perf_counter_ns())

    def end(self, op: int, status: Any = "done", final: Any = None) -> None:
        self.ops.end(op, status, final, perf_counter_ns())

    def end_after(self, op: int, events: Any, final: Any = None) -> None:
        self.ops.end_after(op, events, "done", final, perf_counter_ns())

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
    op = engine.begin("load", [page_set(0, [4, 5])])
    final = Final()
    final.close("a")
    final.open("b", 0, [1, 2], 5, namespace=7, ids=[10, 11])
    final.remap("b", 0, 1, [3])
    final.void(0, [3])
    final.write(1, ["b", "c"], [1, 2], [5, 0, 1], [9, 8, 7], [20, 21, 22])
    final.copy(0, [1], [2])
    final.free(0, [6])
    engine.end(op, "failed", final)
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


def test_scope_is_copied_at_the_call(engine: Engine) -> None:
    raw: Any = [1, 2]
    engine.begin("main", [PageSet(group=0, pages=raw)])
    raw[:] = [7, 7]
    (begin,) = engine.take()
    assert begin.scope[0].pages == column([1, 2])


def test_what_is_told_after_an_end_is_not_in_it(engine: Engine) -> None:
    final = told(lambda final: final.close("a"))
    engine.end(engine.begin(), "done", final)
    waiting = engine.begin()
    engine.end_after(waiting, [], final)
    final.close("b")
    engine.ops.poll()
    assert [end.closed for end in engine.take() if isinstance(end, End)] == [["a"], ["a"]]


def test_time_spent_telling_counts_once(engine: Engine) -> None:
    final = Final()
    assert final.engine_ns == 0
    final.write(0, ["r"], [1], [0], [1], [2])
    final.free(0, [1])
    spent = final.engine_ns
    assert spent > 0
    engine.end(engine.begin(), "done", final)
    engine.end_after(engine.begin(), [], final)
    assert engine.ops.engine_ns == spent
    engine.end_after(engine.begin(), [], lambda: told(lambda final: final.close("r")))
    engine.ops.poll()
    assert engine.ops.engine_ns == spent, "the sender's time is not the engine's"


def test_a_fact_that_is_no_integer_stops_the_stream_before_it(engine: Engine, page: AnnouncePage) -> None:
    engine.end(engine.begin(), "done", told(lambda final: final.write(0, ["r"], [1], [0], [1.5], [2])))
    engine.begin()
    assert page.read() == 3
    taken: list[int] = []
    for _ in range(2):
        with pytest.raises(TypeError):
            engine.ops.drain(lambda number, message: (taken.append(number), True)[1])
    assert taken == [1]


def test_end_waits_for_every_event(engine: Engine) -> None:
    events = [Event(), Event()]
    resolved: list[int] = []

    def final() -> Final:
        resolved.append(1)
        return told(lambda final: final.close("r"))

    op = engine.begin()
    engine.end_after(op, events, final)
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
    first, second, third, other = (engine.begin(lane) for lane in ("main", "main", "main", "load"))
    engine.take()
    events = [Event(), Event(), Event()]
    engine.end_after(first, [events[0]])
    engine.end_after(second, [events[1]])
    engine.end(third)
    engine.end_after(other, [events[2]])
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
    open_op = engine.begin("load", [page_set(0, [1])])
    waiting = engine.begin()
    engine.end_after(waiting, [Event()])
    engine.take()
    engine.state = SnapshotState(rows=[row_open("r", 0, [1], 3)], cached=[page_set(0, [2])])
    engine.ops.want_snapshot()
    engine.ops.snapshot_if_idle()
    assert engine.asked == 0, "ops are open"
    op = engine.begin()
    engine.begin()
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
    engine.end(engine.begin())
    engine.ops.want_snapshot()
    engine.ops.snapshot_if_idle()
    assert engine.asked == 0


def test_ops_are_tracked_without_a_session(page: AnnouncePage) -> None:
    engine = Engine(page)
    engine.ops.close_session()
    kept, ended = engine.begin(), engine.begin()
    engine.end(ended)
    engine.ops.want_snapshot()
    assert engine.take() == []
    fresh = AnnouncePage.create()
    engine.ops.open_session(fresh)
    engine.ops.want_snapshot()
    engine.begin()
    snapshot, _ = engine.take()
    assert [entry.op for entry in snapshot.open_ops] == [kept]
    assert fresh.read() == 2
    fresh.close()


def test_provider_that_calls_back_does_not_deadlock(page: AnnouncePage) -> None:
    engine = Engine(page)
    engine.ops._snapshot = lambda: (engine.begin(), SnapshotState())[1]
    engine.ops.want_snapshot()
    engine.begin()
    assert len(engine.take()) == 3


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda engine, op: engine.begin(7), TypeError),
        (lambda engine, op: engine.begin("main", [3]), AttributeError),
        (lambda engine, op: engine.end(op + 1, "done", None), ValueError),
        (lambda engine, op: engine.end(op, "finished", None), ValueError),
        (lambda engine, op: engine.end(op, "done", 3), AttributeError),
        (lambda engine, op: engine.end(op, "done", told(lambda final: final.free(0, None))), TypeError),
        (lambda engine, op: engine.end_after(op, 3), TypeError),
        (lambda engine, op: engine.end_after(99, []), ValueError),
    ],
)
def test_bad_calls_raise_here_and_send_nothing(call: Any, error: type[Exception], engine: Engine) -> None:
    op = engine.begin()
    engine.take()
    with pytest.raises(error):
        call(engine, op)
    assert engine.take() == []


def test_open_ops_are_bounded(engine: Engine) -> None:
    for _ in range(limits.MAX_OPEN_OPS):
        engine.begin()
    with pytest.raises(RuntimeError, match="never ended"):
        engine.begin()


def test_ending_twice_is_an_error(engine: Engine) -> None:
    op = engine.begin()
    engine.end(op)
    with pytest.raises(ValueError, match="not open"):
        engine.end(op)
    waiting = engine.begin()
    engine.end_after(waiting, [Event()])
    with pytest.raises(ValueError, match="already"):
        engine.end(waiting)

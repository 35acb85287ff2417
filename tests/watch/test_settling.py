"""When a stamp becomes final, and when it does not."""

from __future__ import annotations

from canaryd.wire.messages import Begin, End
from tests.watch.harness import Bench, group_spec, opened, pages, writes

ROW = {"opened": [opened("a", ids=[5, 6, 7])], "writes": [writes(("a", [0, 1, 2], [5, 6, 7], [8, 9, 10]))]}


def test_written_slots_are_stamped_and_settle() -> None:
    bench = Bench()
    bench.op(**ROW)
    assert bench.state(8) == "pending"
    bench.tick()
    assert [bench.state(slot) for slot in (8, 9, 10, 11)] == ["settled", "settled", "settled", "unknown"]
    assert bench.watch.counters.stamped == 3
    report = bench.watch.explain(0, 9, bench.now)
    assert (report.guarded, report.generation, report.rows, report.page, report.last_op) == (True, 1, 1, 2, 1)


def test_a_stamp_waits_for_the_stream_to_reach_the_announced_number() -> None:
    bench = Bench()
    bench.op(**ROW)
    bench.now += 1
    bench.burst(announced=bench.seq + 1)
    assert bench.state(8) == "provisional"
    bench.end(bench.begin())
    assert bench.state(8) == "settled"


def test_a_stamp_waits_for_unscoped_ops_that_began_before() -> None:
    bench = Bench()
    bench.op(**ROW)
    first = bench.begin()
    bench.now += 1
    bench.burst()
    later = bench.begin()
    assert bench.state(8) == "provisional"
    bench.end(first)
    assert bench.state(8) == "settled", "an op that began after the burst cannot have written before it"
    bench.end(later)


def test_a_named_write_between_launch_and_judgement_drops_the_stamp() -> None:
    bench = Bench()
    bench.op(**ROW)
    op = bench.begin()
    bench.now += 1
    bench.burst()
    bench.scribble([9])
    bench.end(op, writes=[writes(("a", [1], [6], [9]))])
    assert [bench.state(slot) for slot in (8, 9, 10)] == ["settled", "pending", "settled"]
    assert bench.watch.counters.stamps_dropped["generation"] == 1
    assert bench.watch.counters.skipped["rewritten"] == 1
    bench.settle()
    assert bench.state(9) == "settled"
    bench.tick(60)
    assert bench.findings == []


def test_slots_under_a_scope_are_not_stamped() -> None:
    bench = Bench()
    load = bench.begin(scope=[pages(2)])
    bench.op(**ROW)
    bench.tick(2)
    assert bench.state(8) == "pending"
    assert bench.watch.counters.stamped == 0
    bench.end(load)
    bench.settle()
    assert bench.state(8) == "settled"


def test_a_scope_that_opens_before_judgement_drops_the_stamp_and_it_is_made_again() -> None:
    bench = Bench()
    bench.op(**ROW)
    bench.now += 1
    bench.burst(announced=bench.seq + 1)
    load = bench.begin(scope=[pages(2)])
    assert bench.state(8) == "pending"
    assert bench.watch.counters.stamps_dropped["scope"] == 3
    bench.end(load)
    bench.settle()
    assert bench.state(8) == "settled"


def test_a_free_before_the_stamp_is_final_is_counted() -> None:
    bench = Bench()
    bench.op(**ROW)
    op = bench.begin()
    bench.now += 1
    bench.burst()
    bench.end(op, closed=["a"], freed=[pages(2)])
    assert bench.state(8) == "freed"
    assert bench.watch.counters.skipped["freed"] == 3
    assert bench.watch.counters.stamps_dropped["freed"] == 3


def test_bursts_are_judged_in_order() -> None:
    bench = Bench()
    bench.op(**ROW)
    hold = bench.begin()
    bench.now += 1
    bench.burst()
    bench.op(writes=[writes(("a", [3], [8], [11]))])
    bench.now += 1
    bench.burst()
    assert bench.watch.report(bench.now).provisional_bursts == 2
    assert bench.state(11) == "provisional"
    bench.end(hold)
    assert [bench.state(slot) for slot in (8, 11)] == ["settled", "settled"]


def test_a_lost_burst_is_made_again() -> None:
    bench = Bench()
    bench.op(**ROW)
    bench.now += 1
    assert bench.watch.next_burst(bench.now) is not None
    assert bench.watch.next_burst(bench.now) is None, "one burst at a time"
    bench.watch.on_burst_lost(bench.now)
    assert bench.watch.counters.stamps_dropped["lost"] == 3
    bench.settle()
    assert bench.state(8) == "settled"


def test_voided_slots_lose_their_stamp() -> None:
    bench = Bench()
    bench.op(**ROW)
    bench.settle()
    bench.op(voids=[pages(2)])
    bench.scribble([8, 9, 10])
    bench.tick(60)
    assert bench.state(8) == "void"
    assert bench.findings == []


def test_a_failed_op_changes_only_what_it_names() -> None:
    bench = Bench()
    bench.op(**ROW)
    bench.op(opened=[opened("b")], writes=[writes(("b", [0], [1], [20]))])
    bench.settle()
    op = bench.begin()
    bench.scribble([8, 9, 10])
    bench.end(op, status="failed", voids=[pages(2)])
    bench.tick(60)
    assert bench.state(8) == "void"
    assert bench.state(20) == "settled"
    assert bench.findings == []


def test_reserved_slots_are_never_stamped() -> None:
    bench = Bench([group_spec(reserved=[(0, 4)])])
    bench.op(writes=[writes(("padding", [0], [0], [2]))])
    bench.settle()
    assert bench.state(2) == "reserved"
    assert bench.watch.counters.stamped == 0
    assert bench.findings == []


def test_unguarded_time_and_stamp_lag_are_observed() -> None:
    bench = Bench()
    bench.send(Begin(op=77))
    bench.now += 2.0
    bench.scribble([8])
    bench.send(End(op=77, opened=[opened("a")], writes=[writes(("a", [0], [5], [8]))]))
    bench.tick()
    unguarded, lag = bench.watch.counters.unguarded_seconds, bench.watch.counters.stamp_lag_seconds
    assert sum(unguarded.counts) == sum(lag.counts) == 1
    assert abs(unguarded.sum - 2.1) < 1e-6
    assert abs(lag.sum - 0.1) < 1e-6


def test_copies_take_their_sources_identity_and_are_stamped() -> None:
    from tests.watch.harness import copies

    bench = Bench()
    bench.op(**ROW)
    bench.op(copies=[copies([8, 9, 10], [24, 25, 26])], opened=[opened("b", [6], 3, [5, 6, 7])])
    bench.settle()
    assert [bench.state(slot) for slot in (24, 25, 26)] == ["settled"] * 3
    bench.tick(60)
    assert bench.findings == []
    bench.flip(25)
    bench.tick(60)
    assert [(f.check, f.row) for f in bench.findings] == [("content", "b")]

"""Attach, gaps and snapshots: what is doubted, adopted, forgotten."""

from __future__ import annotations

import pytest

from canaryd.watch.burst import BurstResult
from canaryd.watch.policy import Policy
from canaryd.watch.runs import expand_runs
from canaryd.wire.messages import Begin, End, Snapshot
from tests.watch.harness import Bench, copies, group_spec, opened, pages, remap, writes

IDS = [5, 6, 7]


def snapshot(**parts: object) -> Snapshot:
    return Snapshot(**{"open_ops": [], "rows": [], "cached": [], **parts})


def bench_with_row() -> Bench:
    bench = Bench()
    bench.op(opened=[opened("a", ids=IDS)], writes=[writes(("a", range(3), IDS, [8, 9, 10]))])
    bench.settle()
    return bench


def lose_a_message(bench: Bench) -> None:
    bench.seq += 1
    bench.end(bench.begin())
    assert bench.watch.take_resync() == "gap"


def test_nothing_is_judged_before_the_first_snapshot() -> None:
    bench = Bench(snapshot=False)
    assert bench.watch.take_resync() == "attach"
    assert bench.watch.take_resync() is None
    bench.op(opened=[opened("a")], writes=[writes(("a", [0], [5], [999]))])
    bench.now += 1
    assert bench.watch.next_burst(bench.now) is None
    assert bench.collect() == []
    assert bench.watch.report(bench.now).in_gap


def test_a_snapshot_that_does_not_come_is_asked_for_again() -> None:
    bench = Bench(snapshot=False)
    assert bench.watch.take_resync() == "attach"
    bench.watch.next_burst(bench.now)
    bench.now += 6
    bench.watch.next_burst(bench.now)
    assert bench.watch.take_resync() == "attach"


def test_what_a_snapshot_names_is_adopted_and_counted() -> None:
    bench = Bench(snapshot=False)
    bench.send(snapshot(rows=[opened("a", [2], 3, IDS), opened("b", [3], 2)], cached=[pages(5)]))
    bench.settle()
    assert [bench.state(slot) for slot in (8, 10, 11, 12, 13, 14, 20, 23, 24)] == [
        *["settled"] * 2, "unknown", *["settled"] * 2, "unknown", *["settled"] * 2, "unknown",
    ]  # fmt: skip
    assert bench.watch.counters.reblessed == {"attach": 9, "gap": 0, "revived": 0}
    bench.op(writes=[writes(("a", [3], [8], [11]), ("b", [2], [9], [14]))])
    bench.tick(80)
    assert bench.findings == []
    bench.op(closed=["a"])
    bench.op(opened=[opened("c", [2], 3, [5, 66, 7])])
    bench.tick(5)
    assert [(f.check, f.slots) for f in bench.findings] == [("token", [(9, 9)])]
    bench.flip(22)
    bench.tick(700)
    assert [f.check for f in bench.findings] == ["token", "content"]


def test_a_hole_in_the_numbers_is_a_gap_and_equal_bytes_settle_with_their_history() -> None:
    bench = bench_with_row()
    lose_a_message(bench)
    assert bench.watch.counters.gaps == 1
    assert bench.state(9) == "doubt"
    assert not bench.watch.explain(0, 9, bench.now).guarded
    bench.now += 1
    assert bench.watch.next_burst(bench.now) is None
    bench.send(snapshot(rows=[opened("a", [2], 3, IDS)]))
    bench.settle()
    assert bench.state(9) == "settled"
    counters = bench.watch.counters
    assert counters.verified["doubt"] == 3
    assert counters.reblessed["gap"] == 0
    assert counters.stamped == 3
    assert bench.watch.explain(0, 9, bench.now).generation == 1


def test_other_bytes_after_a_gap_are_stamped_anew_and_counted() -> None:
    bench = bench_with_row()
    lose_a_message(bench)
    bench.scribble([9])
    bench.send(snapshot(rows=[opened("a", [2], 3, IDS)]))
    bench.tick(60)
    assert bench.findings == []
    assert bench.state(9) == "settled"
    assert bench.watch.counters.reblessed["gap"] == 1
    bench.flip(9)
    bench.tick(60)
    assert [f.check for f in bench.findings] == ["content"]


def test_a_page_that_was_handed_on_during_a_gap_is_not_held_against_its_new_row() -> None:
    bench = bench_with_row()
    lose_a_message(bench)
    bench.send(snapshot(rows=[opened("b", [2], 3, [1, 2, 3])]))
    bench.tick(60)
    assert bench.findings == []
    assert bench.watch.counters.reblessed["gap"] == 3


def test_what_a_snapshot_does_not_name_is_forgotten() -> None:
    bench = bench_with_row()
    lose_a_message(bench)
    bench.send(snapshot())
    bench.scribble([8, 9, 10])
    bench.tick(60)
    assert bench.state(9) == "unknown"
    assert bench.watch.counters.skipped["forgotten"] == 3
    assert bench.findings == []


def test_a_gap_drops_provisional_bursts_suspects_and_pending_stamps() -> None:
    bench = bench_with_row()
    bench.flip(9)
    while not bench.watch.report(bench.now).open_suspects:
        bench.now += 0.1
        bench.burst()
    bench.op(writes=[writes(("a", [3], [8], [11]))])
    bench.begin()
    bench.now += 0.1
    bench.burst()
    bench.now += 0.1
    burst = bench.watch.next_burst(bench.now)
    lose_a_message(bench)
    if burst is not None:
        bench.watch.on_burst_done(bench.backend.run(burst), bench.seq, bench.now)
    assert bench.watch.counters.dismissed["gap"] == 1
    assert bench.watch.counters.skipped["gap"] == 1
    assert bench.watch.counters.stamps_dropped["gap"] == 1
    bench.send(snapshot(rows=[opened("a", [2], 4, [*IDS, 8])]))
    bench.tick(60)
    assert bench.collect() == []
    assert [bench.state(slot) for slot in (8, 9, 10, 11)] == ["settled"] * 4


def test_ops_of_a_snapshot_hold_results_back_until_they_end() -> None:
    bench = Bench(snapshot=False)
    bench.send(snapshot(rows=[opened("a", [2], 3, IDS)], open_ops=[Begin(op=50), Begin(op=51, scope=[pages(3)])]))
    bench.tick(2)
    assert bench.state(8) == "provisional"
    bench.scribble([9])
    bench.send(End(op=50, writes=[writes(("a", [1], [6], [9]))]))
    bench.send(End(op=51, opened=[opened("b", ids=[4])], writes=[writes(("b", [0], [4], [12]))]))
    bench.settle()
    assert [bench.state(slot) for slot in (8, 9, 12)] == ["settled"] * 3
    bench.tick(60)
    assert bench.findings == []


def test_further_losses_in_a_gap_ask_for_no_further_snapshot_before_its_time() -> None:
    bench = bench_with_row()
    lose_a_message(bench)
    asked = []
    for _ in range(120):
        bench.now += 0.1
        bench.seq += 1
        bench.end(bench.begin())
        bench.watch.next_burst(bench.now)
        asked.append(bench.watch.take_resync())
    assert asked.count("gap") == 2
    assert bench.watch.counters.gaps == 1
    bench.send(snapshot(rows=[opened("a", [2], 3, IDS)]))
    assert not bench.watch.report(bench.now).in_gap
    lose_a_message(bench)


def test_a_burst_that_two_gaps_drop_is_counted_once() -> None:
    bench = bench_with_row()
    bench.op(writes=[writes(("a", [3], [8], [11]))])
    bench.now += 0.1
    assert bench.watch.next_burst(bench.now) is not None
    for _ in range(2):
        lose_a_message(bench)
        bench.send(snapshot(rows=[opened("a", [2], 4, [*IDS, 8])]))
    assert bench.watch.counters.stamps_dropped["gap"] == 1


def test_a_snapshot_with_too_many_open_ops_leaves_nothing_behind() -> None:
    bench = Bench(policy=Policy(max_open_ops=2), snapshot=False)
    bench.watch.take_resync()
    bench.send(snapshot(rows=[opened("gone", [2], 3, IDS)], open_ops=[Begin(op=op) for op in range(3)]))
    assert bench.watch.take_resync() == "gap"
    assert bench.watch.report(bench.now).in_gap
    bench.send(snapshot(rows=[opened("a", [2], 3, [7, 6, 5])]))
    report = bench.watch.report(bench.now)
    assert (report.open_rows, report.open_ops, report.in_gap) == (1, 0, False)
    bench.op(writes=[writes(("a", [3], [8], [11]))])
    bench.tick(60)
    assert bench.collect() == []
    assert bench.state(11) == "settled"


def test_a_snapshot_that_nobody_asked_for_doubts_everything() -> None:
    bench = bench_with_row()
    bench.send(snapshot(rows=[opened("a", [2], 3, IDS)]))
    assert bench.state(9) == "doubt"
    assert bench.watch.counters.oddities["unasked_snapshot"] == 1
    bench.settle()
    assert bench.state(9) == "settled"


def test_a_malformed_message_is_as_bad_as_a_lost_one() -> None:
    bench = bench_with_row()
    op = bench.begin()
    bad = writes(("a", [3], [8], [11]))
    bench.end(op, writes=[type(bad)(group=0, rows=["a"], counts=bad.counts, positions=b"\0", tokens=b"", slots=b"")])
    assert bench.watch.counters.oddities["bad_column"] == 1
    assert bench.watch.take_resync() == "gap"


def test_freed_pages_that_come_back_are_doubted() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2)])
    bench.scribble([9])
    bench.op(opened=[opened("b", [2], 3, IDS)])
    assert bench.state(9) == "doubt"
    bench.tick(60)
    assert bench.findings == []
    assert [bench.state(slot) for slot in (8, 9, 10)] == ["settled"] * 3
    assert bench.watch.counters.reblessed["revived"] == 1


def reading(bench: Bench, slot: int) -> BurstResult:
    """Ticks until a burst compares `slot`; its result, which is not judged yet."""
    while True:
        bench.now += bench.policy.tick_seconds
        burst = bench.watch.next_burst(bench.now)
        assert burst is not None
        result = bench.backend.run(burst)
        compared = [expand_runs(work.compare.runs, 4)[0] for work in burst.works if work.compare]
        if any(slot in slots for slots in compared):
            return result
        bench.watch.on_burst_done(result, bench.seq, bench.now)


@pytest.mark.parametrize("times", [1, 2])
def test_what_was_read_before_a_page_was_freed_says_nothing_of_it_after_it_came_back(times: int) -> None:
    bench = bench_with_row()
    for again in range(times):
        result = reading(bench, 9)
        bench.op(closed=["a"], freed=[pages(2)])
        bench.scribble([9])
        bench.op(opened=[opened("a", [2], 3, IDS)])
        bench.watch.on_burst_done(result, bench.seq, bench.now)
        assert bench.state(9) == ("doubt" if again == 0 else "pending")
    bench.tick(60)
    assert bench.collect() == []
    assert bench.state(9) == "settled"


def test_a_row_that_moves_to_pages_which_were_freed_guards_them_again() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2)])
    bench.op(opened=[opened("b", ids=IDS)], writes=[writes(("b", range(3), IDS, [12, 13, 14]))])
    bench.op(remaps=[remap("b", 0, [2])])
    assert bench.state(9) == "doubt"
    bench.settle()
    assert bench.state(9) == "settled"
    assert bench.watch.counters.skipped["unknown_prefix"] == 0
    bench.flip(9)
    bench.tick(60)
    assert [(f.check, f.slots, f.row) for f in bench.findings] == [("content", [(9, 9)], "b")]


NEVER_WRITTEN = {
    "never seen": {},
    "freed before it was stamped": {
        "opened": [opened("x", ids=IDS)],
        "writes": [writes(("x", range(3), IDS, [20, 21, 22]))],
        "freed": [pages(5)],
    },
    "handed out": {"voids": [pages(5)]},
}


@pytest.mark.parametrize("before", NEVER_WRITTEN.values(), ids=NEVER_WRITTEN.keys())
@pytest.mark.parametrize("moved", [False, True])
def test_every_slot_that_a_row_holds_and_nobody_guards_is_counted_once(before: dict[str, object], moved: bool) -> None:
    bench = bench_with_row()
    bench.op(**before)
    if "freed" in before:
        bench.op(closed=["x"], freed=[pages(5)])
    if moved:
        bench.op(remaps=[remap("a", 0, [5])])
        bench.op(remaps=[remap("a", 0, [5])])
    else:
        bench.op(opened=[opened("b", [5], 3, IDS)])
    bench.settle()
    assert not bench.watch.explain(0, 21, bench.now).guarded
    assert bench.state(21) in ("unknown", "void")
    assert bench.watch.counters.skipped["unknown_prefix"] == 3


def test_a_prefix_that_the_same_end_copies_or_writes_is_guarded_and_not_counted() -> None:
    bench = bench_with_row()
    bench.op(
        opened=[opened("b", [5], 4, [*IDS, 8])],
        writes=[writes(("b", [3], [8], [23]))],
        copies=[copies([8, 9, 10], [20, 21, 22])],
    )
    bench.settle()
    assert [bench.state(slot) for slot in (20, 21, 22, 23)] == ["settled"] * 4
    assert bench.watch.counters.skipped["unknown_prefix"] == 0


def test_frees_that_were_not_promised_are_ignored() -> None:
    bench = Bench(frees=False)
    bench.op(opened=[opened("a", ids=IDS)], writes=[writes(("a", range(3), IDS, [8, 9, 10]))])
    bench.settle()
    bench.op(closed=["a"], freed=[pages(2)])
    assert bench.state(9) == "settled"
    assert bench.watch.counters.oddities["frees_not_promised"] == 1


def test_a_page_that_another_row_holds_is_not_freed() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [2], 3, IDS)])
    bench.op(closed=["a"], freed=[pages(2)])
    assert bench.state(9) == "settled"


@pytest.mark.parametrize("group", [-1, 1, 99])
def test_groups_that_do_not_exist_are_counted(group: int) -> None:
    bench = Bench([group_spec()])
    bench.end(bench.begin(), opened=[opened("a", group=group)], writes=[writes(("a", [0], [1], [2]), group=group)])
    assert bench.watch.counters.oddities["unknown_group"] == 2

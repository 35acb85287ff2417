"""The promised age, budgets, passes, stalled ops and limits."""

from __future__ import annotations

import numpy as np
import pytest

from canaryd.watch.policy import Policy
from tests.watch.harness import SLOT_BYTES, Bench, group_spec, opened, pages, writes


def filled(policy: Policy, *, live: int, idle: int) -> Bench:
    """Rows of 4 tokens on pages 0, 1, 2 …; the first `live` stay open."""
    bench = Bench([group_spec(num_pages=live + idle)], policy=policy)
    for page in range(live + idle):
        name = f"r{page}"
        bench.op(
            opened=[opened(name, ids=range(4))],
            writes=[writes((name, range(4), range(4), range(4 * page, 4 * page + 4)))],
        )
        if page >= live:
            bench.op(closed=[name])
    bench.settle()
    return bench


def test_every_settled_slot_is_verified_within_its_promised_age() -> None:
    policy = Policy(max_age_live=2.0, max_age_idle=6.0)
    bench = filled(policy, live=20, idle=40)
    worst_live = worst_all = 0.0
    for _ in range(200):
        bench.tick()
        report = bench.watch.report(bench.now)
        worst_live = max(worst_live, bench.now - report.oldest_live)
        worst_all = max(worst_all, bench.now - report.oldest_unverified)
    assert worst_live <= policy.max_age_live
    assert worst_all <= policy.max_age_idle
    assert worst_all > policy.max_age_live, "idle slots are not read at the pace of live ones"


def test_a_budget_that_cannot_keep_the_promise_shows_in_the_report() -> None:
    policy = Policy(max_age_live=0.5, max_age_idle=0.5, bytes_per_burst=4 * SLOT_BYTES)
    bench = filled(policy, live=30, idle=0)
    bench.tick(200)
    report = bench.watch.report(bench.now)
    assert bench.now - report.oldest_unverified > 0.5
    assert report.slots["settled"] == 120
    bench.tick(200)
    assert bench.now - bench.watch.report(bench.now).oldest_unverified < 10, "slow, but every slot in turn"


@pytest.mark.parametrize("slots", [0.5, 1, 2, 4])
def test_a_small_budget_starves_nobody(slots: float) -> None:
    """Neither idle slots behind live ones, nor either behind stamps, nor slots larger than the budget."""
    policy = Policy(max_age_live=0.5, max_age_idle=1.0, bytes_per_burst=int(slots * SLOT_BYTES))
    bench = filled(policy, live=12, idle=4)
    bench.tick(70)
    started = bench.now
    for _ in range(250):
        bench.op(writes=[writes(("", range(4), range(4), range(4 * 15, 4 * 16)))])
        bench.tick()
    assert bench.watch.report(bench.now).oldest_unverified > started


def test_doubts_starve_nobody_and_are_not_starved() -> None:
    policy = Policy(max_age_live=0.1, max_age_idle=0.2, bytes_per_burst=4 * SLOT_BYTES)
    bench = filled(policy, live=8, idle=2)
    bench.tick(40)
    started = bench.now
    for turn in range(120):
        row, page = f"d{turn}", 8 + turn % 2
        bench.op(freed=[pages(page)])
        bench.op(opened=[opened(row, [page], 4, range(4))])
        bench.tick()
        bench.op(closed=[row])
    assert bench.watch.report(bench.now).oldest_unverified > started
    assert bench.watch.counters.verified["doubt"] >= 120


def test_no_burst_reads_more_than_its_budget() -> None:
    policy = Policy(max_age_live=0.1, max_age_idle=0.1, bytes_per_burst=10 * SLOT_BYTES)
    bench = filled(policy, live=10, idle=10)
    for page in range(5):
        bench.op(writes=[writes((f"r{page}", [4], [9], [4 * page]))])
    for _ in range(50):
        bench.now += 0.1
        burst = bench.watch.next_burst(bench.now)
        assert burst is not None
        read = sum(
            work.runs.items for group in burst.works for work in (group.stamps, group.compare) if work is not None
        )
        assert 0 < read <= 10
        bench.watch.on_burst_done(bench.backend.run(burst), bench.seq, bench.now)


def test_stamps_and_links_past_their_limit_wait_for_the_next_burst() -> None:
    policy = Policy(max_stamps_per_burst=5, max_link_items_per_burst=3)
    bench = Bench(policy=policy)
    bench.op(opened=[opened("a", ids=range(12))], writes=[writes(("a", range(12), range(12), range(8, 20)))])
    for expected in (5, 10, 12):
        bench.tick()
        assert bench.watch.counters.stamped == expected
    bench.tick(12)
    assert bench.watch.counters.verified["links"] >= 12
    assert bench.findings == []


def test_all_links_are_walked_again_within_the_live_age() -> None:
    bench = Bench(policy=Policy(max_age_live=1.0, max_age_idle=10.0))
    bench.op(opened=[opened("a", ids=range(12))], writes=[writes(("a", range(12), range(12), range(8, 20)))])
    bench.settle()
    # The table is right and the record is not: only a walk over unchanged rows can see it.
    bench.backend.records[0].token[13] = 99
    bench.tick(11)
    assert [(f.check, f.slots) for f in bench.findings] == [("token", [(13, 13)])]


def test_passes_complete_and_their_coverage_is_reported() -> None:
    policy = Policy(max_age_live=2.0, max_age_idle=6.0)
    bench = filled(policy, live=5, idle=20)
    shares = []
    for _ in range(150):
        bench.tick()
        shares.append(bench.watch.report(bench.now).pass_coverage)
    completed = bench.watch.report(bench.now).pass_completed
    assert completed is not None
    assert bench.now - completed < 2 * policy.max_age_idle
    assert all(0 <= share <= 1 for share in shares)
    assert min(shares) < 0.9


def test_a_stalled_op_is_reported_and_its_slots_are_counted_once() -> None:
    bench = filled(Policy(op_stall_seconds=5.0), live=3, idle=0)
    bench.begin(scope=[pages(1, 2)])
    bench.tick(100)
    assert bench.watch.report(bench.now).stalled_ops != []
    assert bench.watch.counters.skipped["stalled"] == 8
    assert bench.watch.counters.oddities["stalled_op"] == 1
    assert bench.watch.report(bench.now).oldest_op_age > 5


def test_an_op_that_never_ends_stops_judgement_and_not_the_daemon() -> None:
    policy = Policy(op_stall_seconds=5.0, max_provisional_bursts=4)
    bench = filled(policy, live=3, idle=0)
    op = bench.begin()
    bench.tick(100)
    report = bench.watch.report(bench.now)
    assert report.provisional_bursts == 4
    assert bench.watch.counters.skipped["stalled"] == 12
    bench.end(op)
    assert bench.watch.report(bench.now).provisional_bursts == 0
    bench.flip(5)
    bench.tick(60)
    assert [f.check for f in bench.findings] == ["content"]


def test_rows_and_ops_past_their_limits() -> None:
    bench = Bench(policy=Policy(max_rows=2, max_open_ops=2))
    bench.op(opened=[opened("a"), opened("b"), opened("c")], writes=[writes(("c", [0], [1], [20]))])
    assert bench.watch.counters.oddities["row_limit"] == 1
    bench.settle()
    assert bench.state(20) == "settled", "content is guarded without a row"
    for _ in range(3):
        bench.begin()
    assert bench.watch.counters.oddities["op_limit"] == 1
    assert bench.watch.take_resync() == "gap"


def test_the_report_counts_states_and_what_is_unguarded() -> None:
    bench = filled(Policy(), live=2, idle=1)
    bench.op(writes=[writes(("r0", [4], [9], [2]), ("r1", [4], [9], [6]))])
    report = bench.watch.report(bench.now)
    assert report.slots["settled"] == 10
    assert report.slots["pending"] == report.pending_stamps == 2
    assert report.unguarded_ratio == pytest.approx(2 / 12)
    assert report.open_rows == 2


def test_questions_about_slots_that_do_not_exist_are_refused() -> None:
    bench = Bench()
    for group, slot in ((0, 64), (0, -1), (1, 0), (-1, 0)):
        with pytest.raises(ValueError, match="no slot"):
            bench.watch.explain(group, slot, bench.now)


@pytest.mark.parametrize(("name", "value"), [("tick_seconds", 0), ("max_rows", -1), ("max_age_live", np.nan)])
def test_policies_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Policy(**{name: value})


def test_a_live_age_above_the_idle_age_is_refused() -> None:
    with pytest.raises(ValueError, match="max_age_live"):
        Policy(max_age_live=10, max_age_idle=5)


def test_a_result_of_another_burst_is_refused() -> None:
    bench = filled(Policy(), live=1, idle=0)
    bench.now += 1
    burst = bench.watch.next_burst(bench.now)
    assert burst is not None
    result = bench.backend.run(burst)
    with pytest.raises(ValueError, match="not outstanding"):
        bench.watch.on_burst_done(type(result)(number=burst.number + 1, groups=()), bench.seq, bench.now)

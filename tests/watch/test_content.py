"""Content: suspects, second reads, findings."""

from __future__ import annotations

import numpy as np

from canaryd.watch.policy import Policy
from tests.watch.harness import Bench, group_spec, opened, pages, writes


def bench_with_row(count: int = 3, policy: Policy | None = None, **options: object) -> Bench:
    bench = Bench([group_spec(num_pages=32)], policy=policy, **options)
    ids = list(range(100, 100 + count))
    bench.op(opened=[opened("a", ids=ids)], writes=[writes(("a", range(count), ids, range(8, 8 + count)))])
    bench.settle()
    return bench


def until_suspect(bench: Bench, slot: int) -> None:
    for _ in range(80):
        bench.now += bench.policy.tick_seconds
        bench.burst()
        if bench.state(slot) == "suspect":
            return
    raise AssertionError("no suspect")


def test_a_flip_is_found_once_and_names_its_row() -> None:
    bench = bench_with_row()
    bench.flip(9)
    bench.tick(200)
    assert [(f.check, f.slots, f.row, f.position, f.live, f.op) for f in bench.findings] == [
        ("content", [(9, 9)], "a", 1, True, 1)
    ]
    assert bench.findings[0].stored_digest != bench.findings[0].seen_digest
    assert bench.watch.counters.mismatches["content"] == 1
    assert bench.state(9) == "damaged"


def test_a_flip_in_an_idle_cached_page_is_found() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"])
    bench.flip(10)
    bench.tick(700)
    assert [(f.check, f.row, f.live) for f in bench.findings] == [("content", "", False)]


def test_the_second_read_is_due_after_the_first_and_before_the_tick() -> None:
    bench = bench_with_row()
    bench.flip(9)
    until_suspect(bench, 9)
    due = bench.watch.next_due(bench.now)
    assert due is not None
    assert 0.010 <= due - bench.now <= 0.020
    bench.now += 0.005
    assert bench.watch.next_burst(bench.now) is None, "not due yet"
    bench.now = due
    burst = bench.watch.next_burst(bench.now)
    assert burst is not None
    assert burst.works[0].compare is not None
    assert burst.works[0].compare.runs.items == 1, "a small burst: only the second read"


def test_a_mismatch_that_does_not_come_again_is_dismissed() -> None:
    bench = bench_with_row()
    bench.flip(9)
    until_suspect(bench, 9)
    bench.flip(9)
    bench.tick()
    assert bench.findings == []
    assert bench.watch.counters.dismissed["not_reproduced"] == 1
    assert bench.state(9) == "settled"


def test_a_legal_write_before_the_second_read_leaves_it_unconfirmed() -> None:
    bench = bench_with_row()
    bench.flip(9)
    until_suspect(bench, 9)
    bench.op(writes=[writes(("a", [1], [101], [9]))])
    bench.tick(2)
    assert bench.findings == []
    assert bench.watch.counters.dismissed["unconfirmed"] == 1
    assert bench.state(9) == "settled"


def test_a_legal_write_during_the_second_read_leaves_it_unconfirmed() -> None:
    bench = bench_with_row()
    bench.flip(9)
    until_suspect(bench, 9)
    op = bench.begin()
    bench.now = bench.watch.next_due(bench.now)
    bench.burst()
    bench.end(op, writes=[writes(("a", [1], [101], [9]))])
    assert bench.collect() == []
    assert bench.watch.counters.dismissed["unconfirmed"] == 1


def test_a_write_under_way_is_dismissed_by_generation() -> None:
    bench = bench_with_row()
    op = bench.begin()
    bench.scribble([8, 9, 10])
    bench.tick(60)
    bench.end(op, writes=[writes(("a", [0, 1, 2], [100, 101, 102], [8, 9, 10]))])
    bench.tick(60)
    assert bench.findings == []
    assert bench.watch.counters.dismissed["generation"] >= 3


def test_a_scope_that_opens_dismisses() -> None:
    bench = bench_with_row()
    op = None
    bench.flip(9)
    for _ in range(60):
        bench.now += 0.1
        burst = bench.watch.next_burst(bench.now)
        if burst is None:
            continue
        result = bench.backend.run(burst)
        hit = any(group.compare is not None and group.compare.items.size for group in result.groups)
        bench.watch.on_burst_done(result, bench.seq + hit, bench.now)
        if hit:
            op = bench.begin(scope=[pages(2)])
            break
    assert op is not None
    assert bench.watch.counters.dismissed["scope"] == 1
    assert bench.state(9) == "settled"


def test_a_freed_slot_is_dismissed() -> None:
    bench = bench_with_row()
    bench.flip(9)
    until_suspect(bench, 9)
    bench.op(closed=["a"], freed=[pages(2)])
    bench.tick(60)
    assert bench.findings == []
    assert bench.watch.counters.dismissed["freed"] == 1


def test_a_wiped_page_is_one_finding_and_its_slots_are_counted() -> None:
    bench = bench_with_row(8)
    bench.memories[0][8:12] = 0
    bench.tick(100)
    assert [(f.check, f.slots, f.slot_count, f.pages) for f in bench.findings] == [("content", [(8, 11)], 4, [2])]
    assert bench.watch.counters.mismatches["content"] == 4


def test_findings_past_the_limit_of_a_burst_are_joined() -> None:
    policy = Policy(max_findings_per_burst=3, max_age_live=0.1, max_age_idle=0.1)
    bench = bench_with_row(40, policy)
    bench.memories[0][8:48] = 0
    bench.tick(10)
    assert [f.slot_count for f in bench.findings] == [4, 4, 32]
    assert bench.findings[-1].slots == [(16, 47)]
    assert bench.watch.counters.mismatches["content"] == 40
    assert bench.watch.counters.findings == 3


def test_a_damaged_slot_is_guarded_again_after_a_legal_write() -> None:
    bench = bench_with_row()
    bench.flip(9)
    bench.tick(60)
    assert bench.state(9) == "damaged"
    bench.op(writes=[writes(("a", [1], [101], [9]))])
    bench.settle()
    assert bench.state(9) == "settled"
    bench.flip(9)
    bench.tick(60)
    assert len(bench.findings) == 2


def test_a_truncated_result_never_calls_a_slot_clean() -> None:
    policy = Policy(max_age_live=0.1, max_age_idle=0.1)
    bench = bench_with_row(40, policy)
    bench.backend.capacity = 5
    before = bench.watch.counters.verified["live"]
    bench.memories[0][8:48] = 0
    bench.now += 0.1
    bench.burst()
    assert bench.watch.counters.verified["live"] == before
    bench.tick(100)
    assert bench.watch.counters.mismatches["content"] == 40
    assert sum(f.slot_count for f in bench.findings) == 40


def test_more_suspects_than_the_limit_are_counted_and_found_later() -> None:
    policy = Policy(max_suspects=4, max_age_live=0.1, max_age_idle=0.1)
    bench = bench_with_row(20, policy)
    bench.memories[0][8:28] = 0
    bench.tick(30)
    assert bench.watch.counters.dismissed["limit"] > 0
    assert sum(f.slot_count for f in bench.findings) == 20


def test_every_reason_is_listed_from_the_start() -> None:
    counters = Bench(snapshot=False).watch.counters
    for totals in (counters.mismatches, counters.dismissed, counters.verified, counters.skipped, counters.reblessed):
        assert set(totals.values()) == {0}
    assert set(counters.mismatches) == {
        "content", "chain", "token", "position", "owner", "lifetime", "landed", "range", "nonfinite", "copy", "input",
    }  # fmt: skip


def test_a_burst_that_reads_while_a_write_lands_raises_nothing() -> None:
    """The write begins after launch, lands before the device reads, and is announced: the worker sees the number."""
    bench = bench_with_row()
    rng = np.random.default_rng(3)
    for _ in range(100):
        bench.now += 0.1
        burst = bench.watch.next_burst(bench.now)
        slot = int(rng.integers(8, 11))
        op = bench.seq + 1
        bench.scribble([slot])
        if burst is not None:
            bench.watch.on_burst_done(bench.backend.run(burst), op, bench.now)
        number = bench.begin()
        bench.end(number, writes=[writes(("a", [slot - 8], [slot + 92], [slot]))])
        bench.collect()
    assert bench.findings == []
    assert bench.watch.counters.dismissed["generation"] > 0


def test_a_storm_becomes_a_bounded_number_of_findings_and_an_exact_count() -> None:
    policy = Policy(max_findings_per_burst=4, max_age_live=4.0, max_age_idle=4.0)
    bench = Bench([group_spec(num_pages=1024)], policy=policy)
    ids = list(range(4000))
    bench.op(opened=[opened("a", ids=ids)], writes=[writes(("a", ids, ids, ids))])
    bench.settle()
    bench.memories[0][:] = 0
    found = []
    for _ in range(250):
        before = len(bench.findings)
        bench.tick()
        found.append(len(bench.findings) - before)
    assert bench.watch.counters.mismatches["content"] == 4000
    assert sum(finding.slot_count for finding in bench.findings) == 4000
    assert {finding.classification for finding in bench.findings} == {"zeroed"}
    assert found[:4] == [4] * 4
    assert max(found[5:]) == 1

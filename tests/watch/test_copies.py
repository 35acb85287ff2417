"""copy: destinations that do not hold what their sources' stamps say, and the legal copies that look like it."""

from __future__ import annotations

import pytest

from tests.watch.harness import Bench, copies, opened, pages, writes

A = [10, 11, 12, 13]


def bench_with_row(settled: bool = True) -> Bench:
    """Row a: 4 tokens on page 2."""
    bench = Bench()
    bench.op(opened=[opened("a", ids=A)], writes=[writes(("a", range(4), A, range(8, 12)))])
    if settled:
        bench.settle()
    return bench


def copy(bench: Bench, *, wrong: tuple[int, ...] = (), status: str = "done", lost: tuple[int, ...] = ()) -> None:
    """Copies page 2 to page 5 for row b; destinations `wrong` get other bytes, `lost` ones none."""
    op = bench.begin()
    before = bench.memories[0].copy()
    bench.memories[0][20:24] = bench.memories[0][8:12]
    for slot in wrong:
        bench.memories[0][slot, 0] ^= 1
    bench.memories[0][list(lost)] = before[list(lost)]
    bench.end(op, status=status, opened=[opened("b", [5], 4, A)], copies=[copies(range(8, 12), range(20, 24))])


def found(bench: Bench) -> list[tuple[str, str, list[tuple[int, int]]]]:
    return [(f.check.value, f.row, f.slots) for f in bench.collect()]


@pytest.mark.parametrize("settled", [True, False])
def test_a_partial_copy_is_a_finding(settled: bool) -> None:
    bench = bench_with_row(settled)
    copy(bench, lost=(22, 23))
    bench.settle()
    bench.tick(2)
    assert found(bench) == [("copy", "b", [(22, 23)])]
    assert bench.watch.counters.mismatches["copy"] == 2
    assert (bench.state(21), bench.state(22)) == ("settled", "damaged")
    assert bench.findings[0].stored_digest == bench.backend.records[0].digest[10]
    assert bench.findings[0].seen_digest == bench.backend.records[0].digest[22]


@pytest.mark.parametrize("settled", [True, False])
def test_a_copy_that_holds_its_source_is_legal(settled: bool) -> None:
    bench = bench_with_row(settled)
    copy(bench)
    bench.tick(60)
    assert found(bench) == []


def test_a_copy_of_what_was_never_written_is_not_judged() -> None:
    bench = bench_with_row()
    bench.op(copies=[copies([40, 8], [44, 45])])
    bench.scribble([44])
    bench.settle()
    assert found(bench) == []


@pytest.mark.parametrize("side", [8, 20])
def test_a_write_after_the_copy_ends_the_judgement(side: int) -> None:
    bench = bench_with_row()
    copy(bench, wrong=(20,))
    bench.op(writes=[writes(("a" if side == 8 else "b", [0], [10], [side]))])
    bench.tick(60)
    assert found(bench) == []


def test_a_source_that_its_own_op_writes_is_not_judged() -> None:
    """Whether the copy or the write came first is not said."""
    bench = bench_with_row()
    op = bench.begin()
    bench.memories[0][20] = bench.memories[0][8]
    bench.scribble([8])
    bench.end(op, writes=[writes(("a", [0], [10], [8]))], copies=[copies([8], [20])])
    bench.tick(60)
    assert found(bench) == []


@pytest.mark.parametrize("pairs", [([8, 9], [9, 20]), ([8, 9], [20, 20])])
def test_copies_of_one_op_that_overlap_are_not_judged(pairs: tuple[list[int], list[int]]) -> None:
    bench = bench_with_row()
    op = bench.begin()
    bench.scribble(pairs[1])
    bench.end(op, copies=[copies(*pairs)])
    bench.tick(60)
    assert ("copy", "", [(20, 20)]) not in found(bench)


def test_an_op_that_failed_promises_nothing() -> None:
    bench = bench_with_row()
    copy(bench, wrong=(20,), status="failed")
    bench.tick(60)
    assert found(bench) == []


def test_a_source_that_was_freed_is_not_judged() -> None:
    """A freed page that comes back may be stamped anew as it is."""
    bench = bench_with_row(settled=False)
    copy(bench, wrong=(20,))
    bench.op(closed=["a"], freed=[pages(2)])
    bench.op(opened=[opened("c", [2], 4, A)])
    bench.tick(60)
    assert found(bench) == []


def test_a_lost_burst_is_made_up_for() -> None:
    bench = bench_with_row()
    copy(bench, wrong=(21,))
    lost = 0
    for _ in range(10):
        bench.now += bench.policy.tick_seconds
        burst = bench.watch.next_burst(bench.now)
        if burst is not None and burst.works[0].copies is not None and not lost:
            lost += 1
            bench.watch.on_burst_lost(bench.now)
        elif burst is not None:
            bench.watch.on_burst_done(bench.backend.run(burst), bench.seq, bench.now)
    assert lost == 1
    assert found(bench) == [("copy", "b", [(21, 21)])]


def test_after_a_gap_nothing_is_known_of_earlier_copies() -> None:
    bench = bench_with_row()
    copy(bench, wrong=(20,))
    bench.watch.on_gap(bench.now)
    bench.resync([opened("a", [2], 4, A), opened("b", [5], 4, A)])
    bench.tick(60)
    assert found(bench) == []


def test_more_copies_than_are_remembered_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("canaryd.watch.copies.MAX_PAIRS", 3)
    bench = bench_with_row()
    copy(bench, wrong=(22, 23))
    bench.settle()
    assert bench.watch.counters.oddities["copy_limit"] == 1
    assert found(bench) == [("copy", "b", [(22, 22)])]

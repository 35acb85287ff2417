"""landed, nonfinite and the watch on reserved ranges: what a stamp's first read tells of the write before it."""

from __future__ import annotations

import pytest

from tests.watch.fake_backend import NAN
from tests.watch.harness import Bench, copies, group_spec, opened, pages, writes

A = [10, 11, 12, 13]
B = [20, 21, 12, 23]


def bench_with_row(reserved: list[tuple[int, int]] | None = None) -> Bench:
    """Row a: 4 tokens on page 2, settled."""
    bench = Bench([group_spec(reserved=reserved or [])])
    bench.op(opened=[opened("a", ids=A)], writes=[writes(("a", range(4), A, range(8, 12)))])
    bench.settle()
    return bench


def found(bench: Bench) -> list[tuple[str, str, str, list[tuple[int, int]]]]:
    return [(f.check.value, f.row, f.classification.value, f.slots) for f in bench.collect()]


def silent_write(bench: Bench, row: str, tokens: list[int], *, status: str = "done", landed: int = 0) -> None:
    """Names a write of page 2 of which only the first `landed` slots reached memory."""
    op = bench.begin()
    bench.scribble(range(8, 8 + landed))
    bench.end(
        op, status=status, opened=[opened(row, ids=tokens)], writes=[writes((row, range(4), tokens, range(8, 12)))]
    )


# --- landed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freed", [[], [2]])
def test_a_write_that_never_landed_on_a_page_used_before_is_a_finding(freed: list[int]) -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(*freed)])
    silent_write(bench, "b", B)
    bench.settle()
    # Slot 10 holds the same token as before: equal bytes could be right.
    assert found(bench) == [("landed", "b", "stale", [(8, 9), (11, 11)])]
    assert bench.watch.counters.mismatches["landed"] == 3
    assert bench.state(9) == "damaged"


def test_only_the_slots_that_did_not_land_are_named() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2)])
    silent_write(bench, "b", B, landed=3)
    bench.settle()
    assert found(bench) == [("landed", "b", "stale", [(11, 11)])]


def test_a_write_that_lands_late_is_a_finding_at_once() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2)])
    silent_write(bench, "b", B)
    bench.settle()
    bench.scribble(range(8, 12))
    assert [check for check, *_ in found(bench)] == ["landed"]


def test_writes_that_land_are_legal() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2)])
    silent_write(bench, "b", B, landed=4)
    bench.tick(60)
    assert found(bench) == []


def test_the_same_tokens_may_leave_the_same_bytes() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2)])
    silent_write(bench, "b", A)
    bench.tick(60)
    assert found(bench) == []


@pytest.mark.parametrize("status", ["failed", "aborted"])
def test_ops_that_did_not_end_well_promise_nothing(status: str) -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2)])
    silent_write(bench, "b", B, status=status)
    bench.tick(60)
    assert found(bench) == []


def test_a_first_write_has_no_bytes_to_be_compared_with() -> None:
    bench = Bench()
    silent_write(bench, "b", B)
    bench.tick(60)
    assert found(bench) == []


def test_only_the_first_stamp_after_a_write_finds_the_one_before_it() -> None:
    """A stamp that was dropped leaves the bytes of the write after it in the record."""
    bench = bench_with_row()
    bench.op(writes=[writes(("a", [1], [61], [9]))])
    op = bench.begin()
    bench.scribble([9])
    bench.now += bench.policy.tick_seconds
    bench.burst()
    bench.end(op, writes=[writes(("a", [1], [62], [9]))])
    bench.settle()
    assert "landed" not in {check for check, *_ in found(bench)}
    assert bench.state(9) == "settled"


def test_a_copy_is_no_write_though_its_source_is_one() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", ids=[1])], writes=[writes(("b", [0], [1], [12]))])
    bench.settle()
    silent_write(bench, "c", B, landed=4)
    op = bench.begin()
    bench.end(op, copies=[copies([9], [12])])
    bench.tick(60)
    assert ("landed", "b", "stale", [(12, 12)]) not in found(bench)


# --- nonfinite --------------------------------------------------------------------------------------------------------


def test_nan_in_a_written_slot_is_a_finding_and_the_slot_stays_guarded() -> None:
    bench = bench_with_row()
    op = bench.begin()
    bench.scribble([12])
    bench.memories[0][12, 2] = NAN
    bench.end(op, writes=[writes(("a", [4], [14], [12]))])
    bench.settle()
    assert found(bench) == [("nonfinite", "a", "nonfinite", [(12, 12)])]
    assert bench.state(12) == "settled"
    bench.tick(60)
    assert len(bench.findings) == 1


def test_nan_in_a_reserved_slot_is_counted_and_no_finding() -> None:
    bench = bench_with_row(reserved=[(0, 4)])
    bench.memories[0][2, 1] = NAN
    bench.tick(60)
    assert found(bench) == []
    assert bench.watch.report(bench.now).nonfinite_reserved == 1
    bench.op(writes=[writes(("padding", [0], [0], [2]))])
    bench.tick(60)
    assert bench.watch.report(bench.now).nonfinite_reserved == 0
    assert bench.state(2) == "reserved"
    assert bench.watch.counters.stamped == 4


def test_all_of_a_large_reserved_range_is_scanned_in_turn() -> None:
    bench = bench_with_row(reserved=[(16, 64)])
    bench.memories[0][16:64, 0] = NAN
    bench.tick(4)
    assert bench.watch.report(bench.now).nonfinite_reserved == 48


def test_notes_that_did_not_fit_are_not_judged() -> None:
    bench = bench_with_row()
    bench.backend.note_capacity = 1
    bench.op(closed=["a"], freed=[pages(2)])
    silent_write(bench, "b", B)
    bench.settle()
    assert [slots for *_, slots in found(bench)] == [[(8, 8)]]
    assert bench.watch.counters.oddities["truncated"] == 1

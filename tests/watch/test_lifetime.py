"""lifetime: pages used after they were freed, or never written, and the healthy engines that look like it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.watch.harness import Bench, copies, group_spec, opened, pages, remap, writes

A = [10, 11, 12, 13, 14, 15]


def bench_with_row(*, tiers: str = "none", frees: bool = True, **options: Any) -> Bench:
    """Row a: 6 tokens on pages 2 and 3."""
    bench = Bench([group_spec(**options)], tiers=tiers, frees=frees)
    bench.op(opened=[opened("a", ids=A)], writes=[writes(("a", range(6), A, range(8, 14)))])
    return bench


def found(bench: Bench) -> list[tuple[str, str, list[tuple[int, int]]]]:
    return [(f.check.value, f.row, f.slots) for f in bench.collect()]


# --- freed while in use -----------------------------------------------------------------------------------------------


def test_a_page_freed_while_a_row_holds_it_is_a_finding() -> None:
    bench = bench_with_row()
    bench.op(freed=[pages(3)])
    assert found(bench) == [("lifetime", "a", [(12, 12)])]
    bench.settle()
    assert bench.state(12) == "settled", "the row goes on using it"


def test_leaving_a_row_is_not_being_freed() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"])
    bench.op(opened=[opened("b", [2], 4, A[:4])])
    bench.tick(60)
    assert found(bench) == []


def test_a_page_that_is_evicted_and_handed_out_in_one_op_is_legal() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"])
    bench.op(opened=[opened("b", ids=[1])], writes=[writes(("b", [0], [1], [8]))], freed=[pages(2)])
    bench.op(closed=["b"], freed=[pages(2)])
    bench.tick(60)
    assert found(bench) == []


def test_a_row_that_closes_or_moves_in_the_same_end_does_not_hold() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", ids=A[:4])], writes=[writes(("b", range(4), A[:4], range(16, 20)))])
    bench.op(remaps=[remap("b", 0, [2])], freed=[pages(4)])
    bench.op(closed=["a", "b"], freed=[pages(2, 3)])
    bench.tick(60)
    assert found(bench) == []


@pytest.mark.parametrize("options", [{"holes_ok": True}, {"ring": 8}])
def test_windows_free_pages_that_their_rows_leave_behind(options: dict[str, Any]) -> None:
    bench = bench_with_row(**options)
    bench.op(freed=[pages(2)])
    assert found(bench) == []


def test_pages_listed_past_a_rows_length_may_be_given_back() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [5, 6], 0)], writes=[writes(("b", [0], [1], [20]))])
    bench.op(freed=[pages(6)])
    assert found(bench) == []


# --- freed under an op ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lane", "faults"), [("load", 1), ("main", 0)])
def test_a_page_freed_under_a_transfer_of_another_lane_is_a_finding(lane: str, faults: int) -> None:
    """An abort gives the pages back while the transfer still writes them."""
    bench = bench_with_row()
    bench.begin(scope=[pages(5, 6)], lane=lane)
    bench.op(freed=[pages(5)])
    assert found(bench) == [("lifetime", "", [(20, 23)])] * faults


def test_a_cached_page_that_is_evicted_for_a_transfer_may_be_named_late() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"])
    load = bench.begin(scope=[pages(2)], lane="load")
    bench.op(freed=[pages(2)])
    bench.end(load, opened=[opened("b", [2])], writes=[writes(("b", range(4), A[:4], range(8, 12)))])
    bench.tick(60)
    assert found(bench) == []


@pytest.mark.parametrize("under_way", [True, False])
@pytest.mark.parametrize("lane", ["main", "side"])
def test_a_closed_row_may_write_a_freed_page_only_from_an_op_under_way_on_the_same_lane(
    under_way: bool, lane: str
) -> None:
    bench = bench_with_row()
    op = bench.begin(lane=lane) if under_way else None
    bench.op(closed=["a"], freed=[pages(2, 3)])
    op = op or bench.begin(lane=lane)
    bench.end(op, writes=[writes(("a", [6], [16], [14]))])
    legal = under_way and lane == "main"
    assert found(bench) == ([] if legal else [("lifetime", "", [(14, 14)])])


def test_rows_that_never_opened_may_write_pages_that_were_free() -> None:
    """A request that is preempted while its first step is under way never opens."""
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2, 3)])
    bench.op(writes=[writes(("never", [0], [1], [8]))], freed=[pages(2)])
    bench.op(freed=[pages(2)])
    assert found(bench) == []


# --- prefixes that nobody wrote ---------------------------------------------------------------------------------------


def test_a_prefix_hit_on_a_freed_page_is_a_finding() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2, 3)])
    bench.op(opened=[opened("b", [2], 4, A[:4])])
    assert found(bench) == [("lifetime", "b", [(8, 11)])]


@pytest.mark.parametrize("voided", [[], [5]])
def test_a_prefix_hit_on_a_page_that_nobody_wrote_is_a_finding(voided: list[int]) -> None:
    bench = bench_with_row()
    bench.op(voids=[pages(*voided)])
    bench.op(opened=[opened("b", [5], 2, [1, 2])])
    assert found(bench) == [("lifetime", "b", [(20, 21)])]


@pytest.mark.parametrize(("tiers", "frees"), [("opaque", True), ("announced", True), ("none", False)])
def test_where_other_tiers_exist_or_frees_are_not_told_it_is_a_restore(tiers: str, frees: bool) -> None:
    bench = bench_with_row(tiers=tiers, frees=frees)
    bench.op(closed=["a"], freed=[pages(2, 3)])
    bench.op(opened=[opened("b", [2], 4, A[:4]), opened("c", [5], 2, [1, 2])])
    bench.tick(60)
    assert found(bench) == []


def test_a_prefix_that_its_own_end_writes_or_copies_is_legal() -> None:
    bench = bench_with_row()
    bench.op(
        opened=[opened("b", [5], 2, [1, 2]), opened("c", [2, 6], 6, A), opened("d", [5], 2, [1, 2])],
        writes=[writes(("b", [0, 1], [1, 2], [20, 21]))],
        copies=[copies([12, 13], [24, 25])],
    )
    bench.tick(60)
    assert found(bench) == []


def test_a_prefix_that_an_op_still_under_way_writes_is_legal_and_one_that_it_does_not_is_a_finding() -> None:
    bench = bench_with_row()
    flying = bench.begin()
    bench.op(opened=[opened("b", [5], 4, [1, 2, 3, 4])])
    assert found(bench) == []
    bench.end(flying, writes=[writes(("b", [0, 1], [1, 2], [20, 21]))])
    assert found(bench) == [("lifetime", "b", [(22, 23)])]


def test_after_a_gap_what_the_snapshot_says_is_believed() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [5], 4, [1, 2, 3, 4])])
    assert len(found(bench)) == 1
    bench.watch.on_gap(bench.now)
    bench.resync([opened("b", [5], 4, [1, 2, 3, 4])], cached=[pages(6)])
    bench.op(opened=[opened("c", [6], 4, [5, 6, 7, 8])])
    bench.tick(60)
    assert len(found(bench)) == 1


# --- freed twice ------------------------------------------------------------------------------------------------------


def test_a_page_freed_twice_and_handed_out_twice_is_an_owner_finding() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], freed=[pages(2, 3)])
    bench.op(freed=[pages(2)])
    bench.op(opened=[opened("b", ids=[1, 2])], writes=[writes(("b", [0, 1], [1, 2], [8, 9]))])
    assert found(bench) == []
    bench.op(opened=[opened("c", ids=[3, 4])], writes=[writes(("c", [0, 1], [3, 4], [8, 9]))])
    assert found(bench) == [("owner", "c", [(8, 9)])]

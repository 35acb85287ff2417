"""owner, range and input, each with the healthy look-alikes that would break a naive check."""

from __future__ import annotations

from typing import Any

import pytest

from tests.watch.harness import Bench, copies, group_spec, opened, pages, remap, writes

A = [10, 11, 12, 13, 14, 15]


def bench_with_row(**options: Any) -> Bench:
    """Row a: 6 tokens on pages 2 and 3."""
    bench = Bench([group_spec(**options)])
    bench.op(opened=[opened("a", ids=A)], writes=[writes(("a", range(6), A, range(8, 14)))])
    return bench


def checks(bench: Bench) -> list[tuple[str, str]]:
    return [(f.check.value, f.row) for f in bench.collect()]


# --- owner ------------------------------------------------------------------------------------------------------------


def test_a_write_into_another_rows_slot_is_an_owner_finding() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b")], writes=[writes(("b", [0], [99], [8]))])
    assert checks(bench) == [("owner", "b")]
    assert bench.watch.counters.mismatches["owner"] == 1


def test_two_rows_given_one_page_in_one_op_is_an_owner_finding() -> None:
    bench = Bench()
    bench.op(
        opened=[opened("a", ids=[1, 2]), opened("b", ids=[3, 4])],
        writes=[writes(("a", [0, 1], [1, 2], [8, 9]), ("b", [0, 1], [3, 4], [8, 9]))],
    )
    assert {check for check, _ in checks(bench)} == {"owner"}


def test_a_row_opened_on_pages_that_hold_other_content_is_an_owner_finding() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [2], 4, [10, 11, 12, 99])])
    assert checks(bench) == [("owner", "b")]


def test_a_write_by_a_row_that_is_gone_is_an_owner_finding() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"])
    bench.op(opened=[opened("b", ids=[1, 2])], writes=[writes(("b", [0, 1], [1, 2], [12, 13]))])
    bench.op(writes=[writes(("a", [6], [16], [12]))])
    assert [check for check, _ in checks(bench)] == ["owner"]


def test_the_same_chain_may_be_shared_and_written_again() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [2], 4, A[:4])], writes=[writes(("a", range(4), A[:4], range(8, 12)))])
    bench.op(opened=[opened("c", [2], 4)])
    assert checks(bench) == []


def test_the_same_tokens_in_another_namespace_are_not_the_same() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [2], 4, A[:4], namespace=3)])
    assert checks(bench) == [("owner", "b")]


def test_rows_closed_in_the_same_end_do_not_hold() -> None:
    bench = bench_with_row()
    bench.op(closed=["a"], opened=[opened("b", ids=[1])], writes=[writes(("b", [0], [1], [8]))])
    assert checks(bench) == []


def test_the_last_write_of_a_row_that_closes_is_legal_though_its_page_was_handed_on() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("p", ids=[1, 2])], writes=[writes(("p", [0, 1], [1, 2], [20, 21]))])
    bench.op(
        closed=["a"],
        opened=[opened("b", [3], 2, [1, 2])],
        writes=[writes(("a", [6], [16], [14]), ("a", [5], [15], [13]))],
        copies=[copies([20, 21], [12, 13])],
        freed=[pages(2, 3)],
    )
    bench.tick(60)
    assert checks(bench) == []


def test_a_write_under_way_when_its_row_closed_is_legal() -> None:
    """Asynchronous engines free at the end of a step while the next one already writes the row, on the same lane."""
    bench = bench_with_row()
    flying = bench.begin()
    bench.op(closed=["a"], freed=[pages(2, 3)])
    bench.op(opened=[opened("b", [3])])
    bench.scribble([14])
    bench.end(flying, writes=[writes(("a", [6], [16], [14]))])
    bench.op(writes=[writes(("b", [0, 1, 2], [1, 2, 3], [12, 13, 14]))])
    bench.tick(60)
    assert checks(bench) == []


def test_a_block_completed_and_given_back_in_the_same_end_leaves_the_row_where_it_was_moved() -> None:
    bench = bench_with_row()
    b = [10, 11, 12, 13]
    bench.op(opened=[opened("b", ids=b)], writes=[writes(("b", range(3), b[:3], [16, 17, 18]))])
    bench.op(remaps=[remap("b", 0, [2])], writes=[writes(("b", [3], [13], [19]))], freed=[pages(4)])
    bench.op(opened=[opened("c", [4])], writes=[writes(("c", [0], [50], [16]), ("b", [4], [14], [20]))])
    bench.tick(60)
    assert checks(bench) == []
    assert bench.watch.explain(0, 8, bench.now).rows == 2


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("known", range(3))
def test_a_row_that_grows_and_moves_in_one_end_is_moved_where_it_grew(index: int, known: int) -> None:
    """The page that it moved away from is free, and is its own next one."""
    ids = list(range(20, 36))
    bench = Bench()
    bench.op(opened=[opened("a", ids=ids)], writes=[writes(("a", range(16), ids, range(16, 32)))])
    grown = [8, 9, 10, 11]
    slots = [page * 4 + offset for page in grown for offset in range(4)]
    first = 4 * min(known, index)
    if known:
        bench.op(opened=[opened("b", ids=ids)], writes=[writes(("b", range(first), ids[:first], slots[:first]))])
    moved = [*grown[:index], 4 + index, *grown[index + 1 :]]
    bench.op(
        opened=[] if known else [opened("b", ids=ids)],
        remaps=[remap("b", index, moved[index:])],
        writes=[writes(("b", range(first, 16), ids[first:], slots[first:]))],
        freed=[pages(grown[index])],
    )
    bench.op(writes=[writes(("b", range(16, 20), range(4), range(4 * grown[index], 4 * grown[index] + 4)))])
    bench.tick(60)
    assert bench.findings == []
    bench.flip(4 * (4 + index))
    bench.tick(60)
    assert [f.check for f in bench.findings] == ["content"]


def test_a_page_that_changes_hands_among_the_rows_of_one_end_is_legal() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", ids=A[:4])], writes=[writes(("b", range(4), A[:4], range(16, 20)))])
    bench.op(opened=[opened("c", [4], 2, [1, 2])], remaps=[remap("b", 0, [2])], copies=[copies([8, 9], [16, 17])])
    assert checks(bench) == []


def test_speculative_tokens_may_be_written_again() -> None:
    bench = bench_with_row()
    bench.op(writes=[writes(("a", [6, 7, 8], [1, 2, 3], [14, 15, 16]))])
    bench.op(writes=[writes(("a", [7, 8, 9], [5, 6, 7], [15, 16, 17]))])
    bench.tick(60)
    assert checks(bench) == []


# --- range ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [-1, 64, 1 << 40, -(1 << 62)])
def test_a_slot_out_of_the_group_is_a_range_finding_and_touches_nothing(slot: int) -> None:
    bench = bench_with_row()
    bench.settle()
    bench.op(writes=[writes(("a", [6], [16], [slot]))])
    assert checks(bench) == [("range", "a")]
    assert bench.state(63) == "unknown"


@pytest.mark.parametrize("where", ["opened", "voids", "freed", "copies", "remaps"])
@pytest.mark.parametrize("page", [-3, 16, 1 << 50])
def test_a_page_out_of_the_group_is_a_range_finding(where: str, page: int) -> None:
    bench = bench_with_row()
    sets: dict[str, Any] = {
        "opened": [opened("b", [page], 2, [1, 2])],
        "voids": [pages(page)],
        "freed": [pages(page)],
        "copies": [copies([8], [page])] if page != 16 else [copies([8], [64])],
        "remaps": [remap("a", 1, [page])],
    }
    bench.op(**{where: sets[where]})
    assert "range" in {check for check, _ in checks(bench)}
    bench.tick(60)


def test_a_copy_from_out_of_the_group_makes_the_destination_unknown() -> None:
    bench = bench_with_row()
    op = bench.begin()
    bench.end(op, copies=[copies([1 << 40], [30])])
    assert checks(bench) == [("range", "")]
    bench.settle()
    assert bench.state(30) == "settled"


def test_a_page_twice_in_a_row_is_a_range_finding() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [5, 5], 8, range(8))])
    assert checks(bench) == [("range", "b")]
    bench.op(opened=[opened("c", ids=[1, 2, 3, 4])], writes=[writes(("c", range(4), [1, 2, 3, 4], range(28, 32)))])
    bench.op(writes=[writes(("c", [4], [5], [28]))])
    assert ("range", "c") in checks(bench)


def test_pages_past_a_rows_length_may_be_anything() -> None:
    bench = bench_with_row()
    bench.op(opened=[opened("b", [5, 5, -1, 2], 4, [1, 2, 3, 4])])
    assert checks(bench) == []


def test_a_reserved_slot_in_a_row_is_a_range_finding_and_padding_is_not() -> None:
    bench = bench_with_row(reserved=[(0, 4)])
    bench.op(writes=[writes(("padding", [0], [0], [1]))])
    assert checks(bench) == []
    bench.op(opened=[opened("b", [0], 2, [1, 2])])
    assert checks(bench) == [("range", "b")]
    bench.op(opened=[opened("c")], writes=[writes(("c", [0], [1], [0]))])
    assert ("range", "c") in checks(bench)


def test_holes_are_legal_only_where_the_group_says_so() -> None:
    bench = bench_with_row(reserved=[(0, 4)], holes_ok=True)
    bench.op(opened=[opened("b", [0, 0, -1, 5], 14, range(14))], writes=[writes(("b", [14, 20], [1, 2], [22, 24]))])
    bench.tick(60)
    assert checks(bench) == []
    strict = bench_with_row()
    strict.op(opened=[opened("b", [-1, 5], 6, range(6))])
    assert {check for check, _ in checks(strict)} == {"range"}
    strict.op(opened=[opened("c", [6], 9, range(9))])
    assert ("range", "c") in checks(strict)


def test_a_ring_repeats_its_slots() -> None:
    bench = Bench([group_spec(ring=8)])
    slots = [8 + position % 8 for position in range(30)]
    bench.op(opened=[opened("a", [2, 3])], writes=[writes(("a", range(30), range(30), slots))])
    bench.tick(60)
    assert checks(bench) == []


def test_a_slot_that_is_not_its_positions_place_is_a_range_finding() -> None:
    bench = bench_with_row()
    bench.op(writes=[writes(("a", [6], [16], [13]))])
    assert ("range", "a") in checks(bench)


# --- input ------------------------------------------------------------------------------------------------------------


def test_a_position_that_does_not_continue_its_row_is_an_input_finding() -> None:
    bench = bench_with_row()
    bench.op(writes=[writes(("a", [7], [17], [15]))])
    assert checks(bench) == [("input", "a")]


def test_a_token_that_is_not_the_announced_one_is_an_input_finding_once() -> None:
    bench = Bench()
    bench.op(opened=[opened("a", ids=[1, 2, 3])], writes=[writes(("a", range(3), [1, 9, 3], [8, 9, 10]))])
    assert checks(bench) == [("input", "a")]
    bench.tick(60)
    assert bench.watch.counters.mismatches["input"] == 1
    assert len(bench.findings) == 1


def test_inputs_without_ids_chunks_and_recompute_are_legal() -> None:
    bench = Bench()
    bench.op(opened=[opened("a", ids=range(8))], writes=[writes(("a", [0, 1, 2], [-1, 1, -1], [8, 9, 10]))])
    bench.op(writes=[writes(("a", [3, 4], [3, 4], [11, 12]))])
    bench.op(writes=[writes(("a", range(8), range(8), range(8, 16)))])
    bench.op(writes=[writes(("a", [8], [77], [16]))])
    bench.tick(60)
    assert checks(bench) == []
    assert bench.watch.counters.verified["links"] > 0


def test_one_row_in_several_stretches_of_one_message() -> None:
    bench = Bench()
    bench.op(
        opened=[opened("a")],
        writes=[
            writes(("a", [0, 1], [5, 6], [8, 9]), ("b", [0], [1], [40]), ("a", [2], [7], [10]), ("a", [1], [6], [9]))
        ],
    )
    bench.tick(60)
    assert checks(bench) == []
    assert [bench.state(slot) for slot in (8, 9, 10)] == ["settled"] * 3

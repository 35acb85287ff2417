"""Row links: does a slot hold what its row says?"""

from __future__ import annotations

import pytest

from tests.watch.harness import Bench, group_spec, opened, remap, writes

A = [10, 11, 12, 13, 14, 15]
B = [20, 21, 22, 23, 24, 25]


def two_rows(scheme: str = "native") -> Bench:
    """Rows a on pages 2, 3 and b on pages 4, 5."""
    bench = Bench(scheme=scheme)
    bench.op(
        opened=[opened("a", ids=A), opened("b", ids=B)],
        writes=[writes(("a", range(6), A, range(8, 14)), ("b", range(6), B, range(16, 22)))],
    )
    bench.settle()
    return bench


@pytest.mark.parametrize("scheme", ["native", "sglang"])
def test_healthy_rows_are_checked_and_raise_nothing(scheme: str) -> None:
    bench = two_rows(scheme)
    bench.tick(60)
    assert bench.findings == []
    assert bench.watch.counters.verified["links"] >= 24


@pytest.mark.parametrize("scheme", ["native", "sglang"])
def test_a_prefix_hit_on_a_reused_page_is_a_token_finding(scheme: str) -> None:
    bench = two_rows(scheme)
    bench.op(closed=["b"])
    bench.op(opened=[opened("c", [4], 4, [20, 21, 99, 23])])
    bench.tick(3)
    assert [(f.check, f.slots, f.row, f.position) for f in bench.findings] == [("token", [(18, 18)], "c", 2)]
    assert bench.watch.counters.mismatches["token"] == 1


def test_a_page_at_another_index_is_a_position_finding() -> None:
    bench = two_rows()
    bench.op(closed=["a"])
    bench.op(opened=[opened("c", [3, 2], 2, [14, 15])])
    bench.tick(3)
    assert [(f.check, f.row) for f in bench.findings] == [("position", "c")]
    assert bench.findings[0].slot_count == 2


def test_the_same_tokens_of_another_history_are_a_chain_finding() -> None:
    bench = Bench()
    other = [1, 2, 3, 4]
    bench.op(
        opened=[opened("a", ids=[*A[:4], 7, 8]), opened("b", ids=[*other, 7, 8])],
        writes=[
            writes(("a", range(6), [*A[:4], 7, 8], range(8, 14)), ("b", range(6), [*other, 7, 8], range(16, 22))),
        ],
    )
    bench.settle()
    bench.op(closed=["b"])
    bench.op(remaps=[remap("a", 1, [5])])
    bench.tick(3)
    assert [(f.check, f.slots, f.row, f.position) for f in bench.findings] == [("chain", [(20, 20)], "a", 4)]


def test_a_prefix_of_another_namespace_is_a_chain_finding() -> None:
    bench = two_rows()
    bench.op(closed=["a"])
    bench.op(opened=[opened("c", [2], 4, A[:4], namespace=9)])
    bench.tick(3)
    assert [(f.check, f.position) for f in bench.findings] == [("chain", 0)]


def test_a_finding_is_not_repeated() -> None:
    bench = two_rows()
    bench.op(closed=["b"])
    bench.op(opened=[opened("c", [4], 4, [20, 21, 99, 23])])
    bench.tick(200)
    assert len(bench.findings) == 1


def test_a_link_is_read_twice_and_a_row_that_changes_dismisses_it() -> None:
    bench = two_rows()
    bench.op(closed=["b"])
    bench.op(opened=[opened("c", [4], 4, [20, 21, 99, 23])])
    bench.now += 0.1
    bench.burst()
    assert bench.findings == []
    assert bench.watch.report(bench.now).open_suspects == 1
    bench.op(closed=["c"])
    bench.tick(3)
    assert bench.findings == []
    assert bench.watch.counters.dismissed["row_changed"] == 1


def test_a_rewrite_before_the_second_check_leaves_it_unconfirmed() -> None:
    bench = two_rows()
    bench.op(closed=["b"])
    bench.op(opened=[opened("c", [4], 4, [20, 21, 99, 23])])
    bench.now += 0.1
    bench.burst()
    bench.op(writes=[writes(("gone", [2], [99], [18]))])
    bench.tick(3)
    assert [f for f in bench.findings if f.check == "token"] == []
    assert bench.watch.counters.dismissed["unconfirmed"] == 1


def test_shared_prefixes_forks_and_recompute_are_healthy() -> None:
    bench = two_rows()
    bench.op(opened=[opened("c", [2], 4, A[:4])], writes=[writes(("c", [4, 5], [77, 78], [24, 25]))])
    bench.op(writes=[writes(("a", [4, 5], A[4:], [12, 13]))])  # recomputed, other bytes
    bench.op(writes=[writes(("b", [6, 7], [55, 56], [22, 23]))])
    bench.op(writes=[writes(("b", [6], [57], [22]))])  # rejected and decoded anew: position 7 is history
    bench.tick(80)
    assert bench.findings == []


def test_rows_without_ids_are_healthy_and_still_checked_by_position() -> None:
    bench = Bench()
    bench.op(opened=[opened("a")], writes=[writes(("a", range(4), [-1] * 4, range(8, 12)))])
    bench.op(opened=[opened("b", [2], 4)], writes=[writes(("b", [4], [5], [12]))])
    bench.op(opened=[opened("c", [2], 4, [1, 2, 3, 4])], writes=[writes(("c", [4], [6], [16]))])
    bench.tick(60)
    assert bench.findings == []
    bench.op(closed=["a", "b", "c"])
    bench.op(opened=[opened("d", [3, 2], 2)])
    bench.tick(60)
    assert [f.check for f in bench.findings] == ["position"]


def test_a_row_without_ids_goes_on_from_the_slot_before() -> None:
    bench = two_rows()
    bench.op(opened=[opened("c", [2], 4)], writes=[writes(("c", [4], [77], [24]))])
    bench.op(opened=[opened("d", [2, 6], 5, [*A[:4], 77])])
    bench.tick(60)
    assert bench.findings == []
    bench.op(opened=[opened("e", [4, 6], 5, [*B[:4], 77])])
    bench.tick(60)
    assert [(f.check, f.row, f.position) for f in bench.findings if f.check != "owner"] == [("chain", "e", 4)]


def test_a_ring_keeps_only_its_window() -> None:
    bench = Bench([group_spec(ring=10)])
    bench.op(opened=[opened("a", [2, 3, 4])], writes=[writes(("a", range(25), range(25), ring_slots(range(25))))])
    for position in range(25, 60):
        bench.op(writes=[writes(("a", [position], [position], ring_slots([position])))])
        if position % 7 == 0:
            bench.tick()
    bench.tick(60)
    assert bench.findings == []
    assert bench.watch.counters.verified["links"] > 20
    assert sum(bench.state(slot) == "settled" for slot in range(64)) == 10


def test_a_ring_slot_of_another_row_is_found() -> None:
    bench = Bench([group_spec(ring=10)])
    bench.op(
        opened=[opened("a", [2, 3, 4]), opened("b", [5, 6, 7])],
        writes=[
            writes(
                ("a", range(10), range(10), ring_slots(range(10))),
                ("b", range(10), range(50, 60), [slot + 12 for slot in ring_slots(range(10))]),
            )
        ],
    )
    bench.settle()
    bench.op(closed=["b"])
    bench.op(remaps=[remap("a", 1, [6, 4])])
    bench.tick(60)
    assert {f.check for f in bench.findings} == {"token"}
    assert bench.findings[0].pages == [6]


def ring_slots(positions: object) -> list[int]:
    return [8 + position % 10 for position in positions]

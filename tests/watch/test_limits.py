"""What a peer can make the core keep: bounded, whatever it says."""

from __future__ import annotations

import numpy as np
import pytest

from canaryd.watch.cause import MAX_POSITIONS
from tests.watch.harness import Bench, group_spec, opened, pages, remap, writes


def kept(bench: Bench) -> int:
    """Elements of all row lists."""
    rows = bench.watch._groups[0].rows
    return int(rows.content.data[0].size + rows.page_lists.data[0].size)


@pytest.mark.parametrize(
    ("position", "tracked"), [(63, True), (64, False), (MAX_POSITIONS - 1, False), (1 << 62, False)]
)
def test_a_row_cannot_be_longer_than_its_group(position: int, tracked: bool) -> None:
    bench = Bench()
    bench.op(opened=[opened("a")], writes=[writes(("a", [position], [7], [(position % 64)]))])
    assert ("input", "a") in {(finding.check.value, finding.row) for finding in bench.collect()}
    rows = bench.watch._groups[0].rows
    assert rows.length[rows.index["a"]] == (64 if position == 63 else 0)
    assert kept(bench) <= 1 << 14


def test_many_rows_that_jump_ahead_are_given_up_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where holes are legal a row may begin anywhere: near position 4,194,303 each one costs 100 MB."""
    monkeypatch.setattr("canaryd.watch.rows._LEAST_ROOM", 1 << 16)
    bench = Bench([group_spec(holes_ok=True)])
    names = [f"r{number}" for number in range(100)]
    far = 1 << 13
    bench.op(
        opened=[opened(name) for name in names],
        writes=[writes(*((name, [far], [1], [far % 4 + 4 * (number % 16)]) for number, name in enumerate(names)))],
    )
    assert bench.watch.counters.oddities["row_limit"] > 0
    assert kept(bench) <= 5 << 16
    bench.tick(3)


@pytest.mark.parametrize(("count", "fits"), [(1 << 12, True), ((1 << 12) + 1, False)])
def test_page_lists_are_bounded(monkeypatch: pytest.MonkeyPatch, count: int, fits: bool) -> None:
    monkeypatch.setattr("canaryd.watch.rows._LEAST_ROOM", 1 << 12)
    bench = Bench([group_spec(holes_ok=True)])
    bench.op(opened=[opened("a", np.full(count, -1))])
    assert bench.watch.counters.oddities["row_limit"] == (not fits)
    bench.op(opened=[opened("b")], remaps=[remap("b", 0, np.full(1 << 12, -1))])
    assert bench.watch.counters.oddities["row_limit"] == 1
    bench.op(closed=["a", "b"])
    bench.op(opened=[opened("c", [2], 4, [1, 2, 3, 4])], freed=[pages(9)])
    assert bench.watch._groups[0].rows.length[bench.watch._groups[0].rows.index["c"]] == 4

"""The conformance kit sees each breach of the contract, and none where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from canaryd.client.facts import Final, SnapshotState, row_open
from canaryd.testing import ConformanceClient
from tests.watch.harness import SLOT_BYTES, group_spec

PAGE = 4


class Bench:
    """A pool of 8 pages, and an engine driven by hand. Page 0 is reserved."""

    def __init__(self, **settings: object) -> None:
        spec = group_spec(num_pages=8, page_size=PAGE, reserved=[(0, PAGE)])
        self.bytes = np.zeros(8 * PAGE * SLOT_BYTES, dtype=np.uint8)
        self.state = SnapshotState()
        self.client = ConformanceClient(
            groups=[spec],
            read=lambda: [self.bytes],
            snapshot=lambda: self.state,
            **{"frees": True, "tiers": "none", "snapshot_every": 1 << 30, **settings},
        )

    def write(self, *slots: int) -> None:
        for slot in slots:
            self.bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] += 1

    def step(self, *slots: int, row: str = "a", first: int = 0, token: int = 7, open_row: bool = True) -> None:
        """An op in which a row writes `slots` from position `first` on, and tells so."""
        op = self.client.begin()
        self.write(*slots)
        final = Final()
        if open_row:
            final.open(row, 0, sorted({slot // PAGE for slot in slots}), 0)
        positions = list(range(first, first + len(slots)))
        final.write(0, [row], [len(slots)], positions, [token + position for position in positions], list(slots))
        self.client.end(op, final=final)

    def kinds(self) -> list[str]:
        self.client.close()
        return [violation.kind for violation in self.client.violations]


def test_an_engine_that_keeps_the_contract() -> None:
    bench = Bench(snapshot_every=1)
    bench.step(4, 5, 6)
    bench.state = SnapshotState(rows=[row_open("a", 0, [1], 3)])
    bench.step(7, first=3, open_row=False)
    bench.state = SnapshotState(rows=[row_open("a", 0, [1], 4)])
    op = bench.client.begin()
    bench.write(0, 1)  # graph padding
    final = Final()
    final.close("a")
    final.free(0, [1])
    bench.client.end(op, final=final)
    assert bench.kinds() == []


def test_bytes_that_change_outside_any_op() -> None:
    bench = Bench()
    bench.step(4, 5)
    bench.write(5)
    bench.step(6, first=2, open_row=False)
    assert bench.kinds() == ["outside"]
    assert "1 slots of group 'full' (5)" in bench.client.violations[0].text


def test_bytes_that_no_op_names() -> None:
    bench = Bench()
    op = bench.client.begin()
    bench.write(4, 9)
    final = Final()
    final.open("a", 0, [1], 0)
    final.write(0, ["a"], [1], [0], [7], [4])
    bench.client.end(op, final=final)
    assert bench.kinds() == ["unnamed"]


def test_overlapping_ops_are_judged_when_both_have_ended() -> None:
    bench = Bench()
    first, second = bench.client.begin(), bench.client.begin("load")
    bench.write(4, 8)
    final = Final()
    final.open("a", 0, [1], 0)
    final.write(0, ["a"], [1], [0], [7], [4])
    bench.client.end(first, final=final)
    assert bench.client.violations == []
    final = Final()
    final.open("b", 0, [2], 0)
    final.write(0, ["b"], [1], [0], [7], [8])
    bench.client.end(second, final=final)
    assert bench.kinds() == []


def test_an_op_that_never_ends() -> None:
    bench = Bench()
    bench.client.begin("load")
    bench.step(4)
    assert bench.kinds() == ["open"]


def test_an_op_that_takes_leave() -> None:
    bench = Bench()
    bench.step(4)
    bench.client.begin()
    assert bench.kinds() == []


def test_ends_wait_for_their_events() -> None:
    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    bench, event = Bench(), Event()
    bench.client.end_after(bench.client.begin(), [event], Final)
    assert bench.client.open_ops() == {1}
    event.done = True
    assert bench.kinds() == []


def test_facts_that_contradict_each_other() -> None:
    bench = Bench()
    bench.step(4, 5)
    bench.step(4, row="b", token=70)
    assert "facts" in bench.kinds()
    assert any("owner" in violation.text for violation in bench.client.violations)


def test_an_unknown_row_closes() -> None:
    bench = Bench()
    final = Final()
    final.close("nobody")
    bench.client.end(bench.client.begin(), final=final)
    assert bench.kinds() == ["facts"]


@pytest.mark.parametrize(
    "rows",
    [[], [row_open("a", 0, [1], 1)], [row_open("a", 0, [2], 2)], [row_open(n, 0, [1], 2) for n in "ab"]],
    ids=["missing", "length", "pages", "unknown"],
)
def test_a_snapshot_that_differs(rows: list[object]) -> None:
    bench = Bench(snapshot_every=1)
    bench.step(4, 5)
    bench.state = SnapshotState(rows=rows)
    bench.client.begin()
    assert [violation.kind for violation in bench.client.violations] == ["snapshot"]


def test_facts_that_cannot_be_sent() -> None:
    bench = Bench()
    final = Final()
    final.free(0, [0.5])
    bench.client.end(bench.client.begin(), final=final)
    assert bench.kinds() == ["message"]

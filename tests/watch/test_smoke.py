from __future__ import annotations

from tests.watch.harness import Bench, opened, writes


def test_a_flip_in_a_settled_slot_is_found_once():
    bench = Bench()
    bench.op(opened=[opened("a", ids=[5, 6, 7])], writes=[writes(("a", [0, 1, 2], [5, 6, 7], [8, 9, 10]))])
    bench.settle()
    assert bench.state(9) == "settled"
    assert bench.findings == []
    bench.flip(9)
    bench.tick(60)
    assert [(f.check, f.slots, f.row, f.position, f.live) for f in bench.findings] == [
        ("content", [(9, 9)], "a", 1, True)
    ]
    assert bench.watch.counters.mismatches["content"] == 1
    assert bench.state(9) == "damaged"

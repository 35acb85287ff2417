"""Whose content a slot holds is believed only where nothing can have replaced it: each case was found by simulation."""

from __future__ import annotations

from canaryd.wire.messages import Snapshot
from tests.watch.harness import Bench, copies, opened, pages, writes


def quiet(bench: Bench) -> bool:
    """A few ticks and nothing is found."""
    bench.tick(8)
    return not bench.findings


def test_cached_bytes_that_a_lost_write_changed_belong_to_nobody() -> None:
    bench = Bench()
    bench.op(
        opened=[opened("a", [2, 3])],
        writes=[writes(("a", range(8), range(8), range(8, 16)))],
    )
    bench.op(closed=["a"])
    bench.settle()
    # An op rewrites page 3 for another prefix; its end is lost.
    bench.begin()
    bench.scribble(range(12, 16))
    bench.seq += 1
    bench.watch.on_gap(bench.now)
    bench.send(Snapshot(open_ops=[], rows=[], cached=[pages(3)]))
    bench.tick(3)
    bench.op(opened=[opened("b", [3], 4, ids=[90, 91, 92, 93, 94])])
    assert quiet(bench)
    assert bench.watch.counters.reblessed["gap"] == 4


def with_doubted_page() -> Bench:
    """Page 2 was settled as row a's; then bytes changed under an op whose end was lost."""
    bench = Bench()
    bench.op(opened=[opened("a", [2])], writes=[writes(("a", range(4), range(4), range(8, 12)))])
    bench.op(closed=["a"])
    bench.settle()
    bench.begin()
    bench.scribble(range(8, 12))
    bench.seq += 1
    bench.watch.on_gap(bench.now)
    bench.send(Snapshot(open_ops=[], rows=[], cached=[pages(2)]))
    return bench


def test_a_row_without_ids_takes_no_history_from_a_doubted_slot() -> None:
    bench = with_doubted_page()
    known = [90, 91, 92, 93, 94]
    bench.op(opened=[opened("b", [2], 4), opened("c", [2], 4, ids=known)])
    assert quiet(bench)


def test_a_row_without_ids_takes_no_history_from_what_its_own_end_replaces() -> None:
    bench = Bench()
    bench.op(
        opened=[opened("a", [2]), opened("b", [3])],
        writes=[
            writes(
                ("a", range(4), [1, 2, 3, 4], range(8, 12)),
                ("b", range(3), [5, 6, 7], range(12, 15)),
            )
        ],
    )
    bench.op(closed=["a"])
    # Page 2 goes to a copy of b, whose last position is one that page 2 held before.
    bench.op(
        opened=[opened("c", [2], 3)],
        voids=[pages(2)],
        copies=[copies(range(12, 15), range(8, 11))],
    )
    bench.op(writes=[writes(("c", [3], [8], [11]))])
    assert quiet(bench)


def test_a_copy_of_a_doubted_slot_has_no_identity() -> None:
    bench = with_doubted_page()
    known = [90, 91, 92, 93, 94]
    bench.op(opened=[opened("b", [3], 4, ids=known)], copies=[copies(range(8, 12), range(12, 16))])
    assert quiet(bench)

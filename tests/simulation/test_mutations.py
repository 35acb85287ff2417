"""The simulator is tested itself: without any one of the rules of core or client, it finds a problem soon."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from canaryd.client.stream import Stream
from canaryd.watch.counters import StampDrop
from canaryd.watch.final_sets import FinalSets
from canaryd.watch.judge import Judge
from canaryd.watch.ledger import Ledger
from canaryd.watch.ops import OpenOps
from canaryd.watch.report import SlotState
from canaryd.watch.watch import Watch
from tests.simulation.world import run_seed

SEEDS = 60
"""Within so many seeds each mutation must be seen."""

Patch = pytest.MonkeyPatch


def announce_after_the_send(patch: Patch) -> None:
    """The announce page follows the queue instead of leading it."""
    put, pop = Stream.put, Stream.pop

    def late(self: Stream, *args: object) -> None:
        cell, self._cell = self._cell, None if self._cell is None else memoryview(bytearray(8)).cast("Q")
        put(self, *args)
        self._cell = cell

    def announcing(self: Stream) -> None:
        number = self.peek()[0]
        pop(self)
        if not self._sealed and self._cell is not None:
            self._cell[0] = number

    patch.setattr(Stream, "put", late)
    patch.setattr(Stream, "pop", announcing)


def skip_the_wait_for_open_ops(patch: Patch) -> None:
    patch.setattr(OpenOps, "hold_back", lambda self, announced: False)


def skip_the_generation_check(patch: Patch) -> None:
    write = Ledger.write

    def quiet(self: Ledger, slots: np.ndarray, **what: object) -> None:
        settled = slots[self.state[slots] == SlotState.SETTLED]
        generation = self.generation[settled]
        write(self, slots, **what)
        self.generation[settled] = generation
        self.state[settled] = SlotState.SETTLED

    patch.setattr(Ledger, "write", quiet)


def releases_raise_the_generation(patch: Patch) -> None:
    close = FinalSets.close_row

    def raising(self: FinalSets, name: str) -> bool:
        row = self._group.rows.index.get(name)
        if row is not None:
            pages = self._group.rows.pages_of(row)
            self._group.ledger.generation[self._group.ledger.in_pages(pages[pages >= 0])] += 1
        return close(self, name)

    patch.setattr(FinalSets, "close_row", raising)


def settle_under_a_scope(patch: Patch) -> None:
    patch.setattr(Ledger, "is_covered", lambda self, slots: np.zeros(slots.size, dtype=np.bool_))
    patch.setattr("canaryd.watch.pace.Pace._uncovered", lambda self, mask: mask)


def forget_a_gap(patch: Patch) -> None:
    patch.setattr(Watch, "on_gap", lambda self, now: None)


def stamp_before_the_snapshot(patch: Patch) -> None:
    on_gap = Watch.on_gap

    def impatient(self: Watch, now: float) -> None:
        on_gap(self, now)
        self._in_gap = False

    patch.setattr(Watch, "on_gap", impatient)


def compare_a_stale_stamp(patch: Patch) -> None:
    """After a gap stamps count as before it."""
    patch.setattr(Ledger, "doubt_all", lambda self: self.cover(np.flatnonzero(self.covered), 0))


def drop_a_reason_counter(patch: Patch) -> None:
    stamps = Judge._stamps

    def silent(self: Judge, *args: object, **kwargs: object) -> None:
        before = self._counters.stamps_dropped[StampDrop.GENERATION]
        stamps(self, *args, **kwargs)
        self._counters.stamps_dropped[StampDrop.GENERATION] = before

    patch.setattr(Judge, "_stamps", silent)


def skip_the_seal(patch: Patch) -> None:
    """A session that ends leaves its page as it was."""
    patch.setattr(Stream, "seal", lambda self: None)


MUTATIONS: list[Callable[[Patch], None]] = [
    announce_after_the_send,
    skip_the_wait_for_open_ops,
    skip_the_generation_check,
    releases_raise_the_generation,
    settle_under_a_scope,
    forget_a_gap,
    stamp_before_the_snapshot,
    compare_a_stale_stamp,
    drop_a_reason_counter,
    skip_the_seal,
]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutation_is_caught(mutation: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    for seed in range(SEEDS):
        outcome = run_seed(seed)
        if outcome.problems:
            print(f"{mutation.__name__}: seed {seed}: {outcome.problems[0]}")
            return
    pytest.fail(f"not caught within {SEEDS} seeds")

"""What is true: which slots faults touched, which must be found, and what may be said of which."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from canaryd.watch.columns import Mask
from canaryd.watch.counters import Check
from canaryd.watch.findings import Finding
from tests.simulation.features import WORDS
from tests.simulation.memory import I64, Pool

CLASSES = ("bit", "bits", "word", "part", "slot", "page", "zeroed_page", "wild_last", "misdirected", "spill")


@dataclass(eq=False)
class Expected:
    """A fault in one settled cell: must be found unless something legal comes first."""

    fault_class: str
    injected_at: float
    shared: bool


@dataclass
class Tally:
    """Totals of one seed."""

    injected: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    shared_settled: int = 0
    shared_found: int = 0
    max_age: float = 0.0


class Oracle:
    """Injects content faults and judges findings."""

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        self.pool = pool
        self.tally = Tally()
        self.problems: list[str] = []
        self._rng = rng
        self.expected: dict[int, Expected] = {}
        self._allowed = np.zeros(pool.words.shape[0], dtype=np.bool_)
        self._ever = self._allowed.copy()
        self._origin: I64 = np.full(pool.words.shape[0], -1, dtype=np.int64)
        self._inherited: I64 = np.zeros(pool.words.shape[0], dtype=np.int64)
        self._clear_at: dict[int, list[I64]] = {}
        self._any = False
        pool.on_write = self._legal_write
        pool.on_copy = self._copied
        pool.on_give_up = self._given_up

    # --- faults -------------------------------------------------------------------------------------------------------

    def inject(self, group: int, slot: int, now: float, *, settled: I64, shared: bool) -> None:
        """A fault of a random class at `slot`; `settled` are the group's slots in which it must be found."""
        fault_class = CLASSES[self._rng.randrange(len(CLASSES))]
        view = self.pool.view(group)
        before = view.copy()
        self._damage(fault_class, view, slot, self.pool.page_sizes[group])
        changed = np.flatnonzero((view != before).any(axis=1))
        if not changed.size:
            return
        self._any = True
        cells = self.pool.cells(group, changed)
        self._allowed[cells] = self._ever[cells] = True
        self.tally.injected[fault_class] += 1
        must = self.pool.cells(group, np.intersect1d(changed, settled))
        if must.size:
            self.tally.settled[fault_class] += int(must.size)
            self.tally.shared_settled += int(must.size) if shared else 0
        for cell in must.tolist():
            if cell not in self.expected:
                self.expected[cell] = Expected(fault_class, now, shared)
            else:
                self.tally.settled[fault_class] -= 1
                self.tally.shared_settled -= 1 if shared else 0

    def _damage(self, fault_class: str, view: I64, slot: int, page_size: int) -> None:
        rng = self._rng
        word, page = rng.randrange(WORDS), slot // page_size * page_size
        fresh = [rng.getrandbits(62) for _ in range(WORDS)]
        match fault_class:
            case "bit":
                view[slot, word] ^= 1 << rng.randrange(63)
            case "bits":
                for bit in rng.sample(range(63), rng.choice((2, 8))):
                    view[slot, word] ^= 1 << bit
            case "word":
                view[slot, word] = fresh[0]
            case "part":
                view[slot, : WORDS // 2] = fresh[: WORDS // 2]
            case "slot":
                view[slot] = fresh
            case "page":
                view[page : page + page_size] = fresh
            case "zeroed_page":
                view[page : page + page_size] = 0
            case "wild_last":
                view[-1] = fresh
            case "misdirected":
                view[slot] = view[rng.randrange(view.shape[0])]
            case "spill":
                view[slot : slot + 2 * page_size] = fresh

    # --- what is legal ------------------------------------------------------------------------------------------------

    def _legal_write(self, cells: I64, op: int) -> None:
        if not self._any:
            return
        touched = cells[self._allowed[cells]]
        if touched.size:
            # What was read before may still be reported until the op's end has been applied.
            self._clear_at.setdefault(op, []).append(touched)
            for cell in touched.tolist():
                self._excuse(cell, "overwritten")

    def _copied(self, sources: I64, destinations: I64, op: int) -> None:
        """A copy of damaged bytes is damaged too, since op `op`."""
        self._origin[destinations] = sources
        if self._any:
            inherits = destinations[self._allowed[sources]]
            self._allowed[inherits] = True
            self._inherited[inherits] = op

    def _given_up(self, cells: I64) -> None:
        if self.expected:
            for cell in cells[self._allowed[cells]].tolist():
                self._excuse(cell, "given_up")

    def _excuse(self, cell: int, why: str) -> None:
        if self.expected.pop(cell, None) is not None:
            self.tally.excused[why] += 1

    def excuse_all(self, why: str) -> None:
        """Stamps are doubted from here on: damage of before may be blessed, and that is reported."""
        for cell in list(self.expected):
            self._excuse(cell, why)

    def applied(self, op: int) -> None:
        """The end of `op` has been applied: nothing of what it overwrote may be reported any more."""
        for cells in self._clear_at.pop(op, ()):
            over = (self.pool.last_op[cells] == op) & (self._inherited[cells] != op)
            self._allowed[cells[over]] = False

    # --- findings -----------------------------------------------------------------------------------------------------

    def judge(self, findings: list[Finding], names: list[str], now: float) -> None:
        """Each finding must be of slots that a fault touched."""
        for finding in findings:
            group = names.index(finding.group)
            for first, last in finding.slots:
                cells = self.pool.cells(group, np.arange(first, last + 1))
                if not self._may_be_named(finding.check, cells).all():
                    self.problems.append(
                        f"false alarm: {finding.check} {finding.group} {first}-{last} {finding.detail}"
                    )
                for cell in cells.tolist():
                    expected = self.expected.pop(cell, None)
                    if expected is not None:
                        self.tally.found[expected.fault_class] += 1
                        self.tally.shared_found += expected.shared
                        self.tally.max_age = max(self.tally.max_age, now - expected.injected_at)

    def _may_be_named(self, check: Check, cells: I64) -> Mask:
        if check is not Check.COPY:
            return self._allowed[cells]
        # A copy differs from its source if either was damaged.
        origin = self._origin[cells]
        return self._allowed[cells] | ((origin >= 0) & self._ever[np.maximum(origin, 0)])

    def missed(self) -> int:
        """Faults that must have been found by now."""
        return len(self.expected)

"""The rules that prevent false alarms are what prevents them: without any one of them, a healthy engine raises some."""

from __future__ import annotations

import numpy as np
import pytest

from canaryd.watch.columns import Mask
from canaryd.watch.ledger import Ledger
from canaryd.watch.ops import OpenOps
from canaryd.watch.report import SlotState
from tests.watch.engine import Features
from tests.watch.simulation import Simulation

REUSING = {"frees": False, "gaps": False, "prefix_cache": False, "copies": False, "failures": False}


def false_alarms(seeds: int = 6, **features: bool) -> int:
    for seed in range(seeds):
        simulation = Simulation(seed, features=Features(**{**REUSING, **features}))
        for _ in range(16):
            simulation.run(100)
            if simulation.findings:
                return len(simulation.findings)
    return 0


def test_with_all_rules_there_are_none() -> None:
    assert false_alarms(seeds=2) == 0


def test_without_the_wait_for_open_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenOps, "hold_back", lambda self, announced: False)
    assert false_alarms() > 0


def test_without_the_generation_check(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Ledger.write

    def quiet(self: Ledger, slots: np.ndarray, **what: object) -> None:
        settled = slots[self.state[slots] == SlotState.SETTLED]
        generation = self.generation[settled]
        write(self, slots, **what)
        self.generation[settled] = generation
        self.state[settled] = SlotState.SETTLED

    monkeypatch.setattr(Ledger, "write", quiet)
    assert false_alarms(zeroing=False) > 0


def test_without_the_announce_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "read_announced", lambda self: 0)
    # Messages wait for the daemon far longer than the second read does.
    monkeypatch.setattr(Simulation, "_deliver", slowly(Simulation._deliver))
    assert false_alarms(seeds=24) > 0


def test_the_announce_page_makes_slow_delivery_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "_deliver", slowly(Simulation._deliver))
    assert false_alarms(seeds=2) == 0


def test_without_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(self: Ledger, slots: np.ndarray) -> Mask:
        return np.zeros(slots.size, dtype=np.bool_)

    monkeypatch.setattr(Ledger, "is_covered", blind)
    monkeypatch.setattr("canaryd.watch.pace.Pace._uncovered", lambda self, mask: mask)
    assert false_alarms(asynchronous=False) > 0


def slowly(deliver: object) -> object:
    def rarely(self: Simulation) -> None:
        if self.rng.random() < 0.1:
            for _ in range(10):
                deliver(self)

    return rarely

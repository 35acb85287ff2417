"""Faults injected into a simulated engine's memory: every one on a settled slot is found, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from canaryd.watch.findings import Finding
from tests.watch.engine import FULL, PAGE, Features
from tests.watch.simulation import Simulation


def slots_of(findings: list[Finding], names: list[str]) -> set[tuple[int, int]]:
    return {
        (names.index(finding.group), slot)
        for finding in findings
        for first, last in finding.slots
        for slot in range(first, last + 1)
    }


def inject(simulation: Simulation, rng: np.random.Generator, slots: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """One fault of a random class; the settled slots that it changed."""
    group, slot = slots[int(rng.integers(len(slots)))]
    memory = simulation.engine.memories[group]
    before = memory.copy()
    page = slot // PAGE * PAGE
    kind = int(rng.integers(5))
    if kind == 0:
        memory[slot, int(rng.integers(memory.shape[1]))] ^= 1 << int(rng.integers(62))
    elif kind == 1:
        memory[slot, int(rng.integers(memory.shape[1]))] = int(rng.integers(1 << 62))
    elif kind == 2:
        memory[slot] = 0
    elif kind == 3:
        memory[page : page + PAGE] = rng.integers(1 << 62)
    else:
        memory[slot] = memory[int(rng.integers(memory.shape[0]))]
    changed = np.flatnonzero((memory != before).any(axis=1)).tolist()
    return {(group, one) for one in changed} & set(slots)


@pytest.mark.parametrize("seed", range(4))
def test_every_content_fault_on_a_settled_slot_is_found_and_nothing_else(seed: int) -> None:
    simulation = Simulation(seed, scheme="sglang" if seed == 3 else "native")
    rng = np.random.default_rng([seed, 2])
    simulation.run(900)
    simulation.quiesce()
    assert simulation.findings == []
    settled = simulation.settled()
    expected: set[tuple[int, int]] = set()
    for _ in range(5):
        expected |= inject(simulation, rng, settled)
        simulation.work_for(0.1)
    assert expected
    simulation.work_for(1.2 * simulation.policy.max_age_idle)
    assert slots_of(simulation.findings, [spec.name for spec in simulation.engine.specs]) == expected
    assert {finding.check for finding in simulation.findings} == {"content"}
    assert simulation.watch.counters.mismatches["content"] == len(expected)


@pytest.mark.parametrize("seed", range(2))
def test_faults_are_found_while_the_engine_goes_on(seed: int) -> None:
    simulation = Simulation(
        seed, features=Features(gaps=False, failures=False, window=seed % 2 == 1, prefix_cache=False)
    )
    rng = np.random.default_rng([seed, 3])
    simulation.run(700)
    # From here on rows only grow: nothing that is settled and live in the full group is written legally.
    simulation.engine.frozen = True
    simulation.engine.features.dedup = False
    simulation.run(100)
    live = [(group, slot) for group, slot in simulation.settled() if group == FULL and _is_live(simulation, slot)]
    expected: set[tuple[int, int]] = set()
    for _ in range(3):
        expected |= inject(simulation, rng, live)
        simulation.run(100)
    simulation.run(1200)
    assert expected
    assert slots_of(simulation.findings, [spec.name for spec in simulation.engine.specs]) == expected


def _is_live(simulation: Simulation, slot: int) -> bool:
    return simulation.watch.explain(FULL, slot, simulation.now).rows > 0

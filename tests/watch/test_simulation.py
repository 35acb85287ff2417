from __future__ import annotations

import pytest

from tests.watch.simulation import Simulation

TURNS = 1200


@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_engine_raises_nothing(seed: int) -> None:
    simulation = Simulation(seed, scheme="sglang" if seed % 4 == 3 else "native")
    simulation.run(TURNS)
    simulation.quiesce()
    assert simulation.findings == []
    counters = simulation.watch.counters
    assert counters.stamped > 50
    assert counters.verified["live"] > 20
    assert counters.verified["links"] > 50

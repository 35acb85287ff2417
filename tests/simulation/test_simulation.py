"""Seeds of the whole world, and the promise that a seed replays."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from tests.simulation.world import run_seed

SEEDS = 40


@pytest.mark.slow
def test_no_seed_raises_a_false_alarm_or_misses_a_fault(seed: int) -> None:
    """CI draws fresh seeds, which replay with `CANARYD_TEST_SEED`."""
    fresh = os.environ.get("CI") == "true" and "CANARYD_TEST_SEED" not in os.environ
    first = time.time_ns() % (1 << 40) if fresh else seed
    print(f"CANARYD_TEST_SEED={first}")
    settled: Counter[str] = Counter()
    for number in range(first, first + SEEDS):
        outcome = run_seed(number)
        assert not outcome.problems, f"{outcome.line()} | {outcome.features}\n{outcome.problems[:5]}"
        settled += outcome.settled
    assert settled.total() > 100, "hardly a fault was injected into a settled slot"


def test_a_seed_replays_to_the_same_line(seed: int) -> None:
    assert run_seed(seed, steps=60).line() == run_seed(seed, steps=60).line()

"""Fresh seeds of the whole world, and the promise that a seed replays."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from tests.simulation.world import run_seed

FRESH_SEEDS = 40


@pytest.mark.slow
def test_fresh_seeds_raise_no_false_alarm_and_miss_nothing() -> None:
    first = int(os.environ.get("CANARYD_TEST_SEED", time.time_ns() % (1 << 40)))
    print(f"CANARYD_TEST_SEED={first}")
    settled: Counter[str] = Counter()
    for seed in range(first, first + FRESH_SEEDS):
        outcome = run_seed(seed)
        assert not outcome.problems, f"{outcome.line()} | {outcome.features}\n{outcome.problems[:5]}"
        settled += outcome.settled
    assert settled.total() > 100, "hardly a fault was injected into a settled slot"


def test_a_seed_replays_to_the_same_line(seed: int) -> None:
    assert run_seed(seed, steps=60).line() == run_seed(seed, steps=60).line()

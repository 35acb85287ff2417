"""The pace: each tick where the budget allows, never more than the budget."""

from __future__ import annotations

import itertools
import random

import pytest

from canaryd.worker.pace import SLICE_SECONDS, Pace, engine_loss


def simulate(pace: Pace, costs: list[float]) -> list[float]:
    """Start times of bursts with these costs."""
    now, starts = 100.0, []
    for cost in costs:
        now = max(now, pace.next_at)
        pace.ticked(now)
        starts.append(now)
        pace.spent(now, cost)
        now += cost
    return starts


def test_cheap_bursts_run_at_each_tick() -> None:
    starts = simulate(Pace(tick=0.1, share=0.01), [0.0001] * 20)
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx([0.1] * 19)


def test_dear_bursts_stretch_the_ticks() -> None:
    starts = simulate(Pace(tick=0.1, share=0.01), [0.005] * 20)
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx([0.5] * 19)


def test_the_share_is_kept_whatever_bursts_cost(seed: int) -> None:
    generator = random.Random(seed)
    share = 0.02
    costs = [generator.choice((0.0, 0.0003, 0.004, 0.2)) for _ in range(500)]
    pace = Pace(tick=0.1, share=share)
    starts = simulate(pace, costs)
    elapsed = max(pace.next_at, starts[-1]) - starts[0]
    assert sum(costs) <= share * elapsed * (1 + 1e-9)


def test_a_second_read_between_ticks_is_paid_for() -> None:
    pace = Pace(tick=0.1, share=0.1)
    pace.ticked(5.0)
    pace.spent(5.0, 0.001)
    pace.spent(5.02, 0.03)
    assert pace.next_at == pytest.approx(5.02 + 0.3)


def test_the_client_counts_in_the_budget_but_never_blinds_the_watch() -> None:
    pace = Pace(tick=0.1, share=0.01)
    pace.client_takes(0.004)
    pace.spent(0.0, 0.006)
    assert pace.next_at == pytest.approx(1.0)
    pace = Pace(tick=0.1, share=0.01)
    pace.client_takes(0.5)
    pace.spent(0.0, 0.005)
    assert pace.next_at == pytest.approx(1.0)


def test_a_burst_that_waits_for_its_slice_costs_the_engine_one_slice() -> None:
    waited = engine_loss(launches=1, bytes_read=1 << 20, busy=0.02)
    assert SLICE_SECONDS < waited < 2 * SLICE_SECONDS
    starts = simulate(Pace(tick=0.1, share=0.005), [waited] * 5)
    assert [later - earlier for earlier, later in itertools.pairwise(starts)] == pytest.approx([0.1] * 4)


def test_engine_loss_grows_with_bytes_and_launches_and_never_exceeds_the_burst() -> None:
    small = engine_loss(launches=1, bytes_read=0, busy=1.0)
    assert engine_loss(launches=40, bytes_read=0, busy=1.0) > small
    assert engine_loss(launches=1, bytes_read=2 << 30, busy=1.0) > small + 0.002
    assert engine_loss(launches=40, bytes_read=2 << 30, busy=0.0001) == 0.0001

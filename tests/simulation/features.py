"""What one seed switches on: swarm testing, each feature and each disturbance at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

PAGE = 8
WORDS = 4
"""8-byte words of a slot: K and V of two layers."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """Engine features first, then disturbances, then sizes. `second`: "" for no second group, "ring" or "state"."""

    prefix_cache: bool
    early_registration: bool
    dedup: bool
    preemption: bool
    asynchronous: bool
    direct_ends: bool
    loads: bool
    aborted_loads: bool
    forks: bool
    failures: bool
    zeroing: bool
    frees: bool
    hidden_ids: bool
    rejected_tokens: bool
    drafter: bool
    padding: bool
    late_closes: bool
    overlay: bool
    loss: bool
    cuts: bool
    worker_restarts: bool
    engine_stops: bool
    sender_stalls: bool
    slow_bursts: bool
    slow_network: bool
    small_queue: bool
    faults: bool
    second: str
    pages: int
    budget: int
    requests: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Features:
        """Engine features with probability 0.6, disturbances with 0.3, faults in nine of ten seeds."""
        disturbances = {"loss", "cuts", "worker_restarts", "engine_stops", "sender_stalls", "slow_bursts"}
        disturbances |= {"slow_network", "small_queue"}
        chosen: dict[str, bool] = {}
        for field in fields(cls):
            if field.type == "bool":
                chosen[field.name] = rng.random() < (0.3 if field.name in disturbances else 0.6)
        chosen["faults"] = rng.random() < 0.9
        # A page must not be told to be free before the writes into it are.
        chosen["late_closes"] |= chosen["frees"]
        second = rng.choice(["", "", "ring", "state"])
        if second:
            # A ring keeps its last positions only: tokens that are rejected would cost it others.
            chosen["prefix_cache"] = chosen["dedup"] = chosen["rejected_tokens"] = False
        return cls(
            **chosen,
            second=second,
            pages=rng.choice([64, 160, 400]),
            budget=rng.choice([24, 96, 384]),
            requests=rng.choice([3, 6, 12]),
        )

    def __str__(self) -> str:
        on = [field.name for field in fields(self) if getattr(self, field.name) is True]
        return f"second={self.second or '-'} pages={self.pages} budget={self.budget} {' '.join(on)}"

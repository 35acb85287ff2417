"""A device of numpy: executes bursts on the pool's bytes in small pieces, with records as the device keeps them.

Its digest is exact for the content of the simulation: a sum of mixed words, each with its own odd factor.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from canaryd.watch.burst import I64, Burst, BurstResult
from canaryd.watch.runs import expand_runs
from tests.watch.fake_backend import FakeBackend


class SimulatedBackend(FakeBackend):
    """Takes the place of `PoolBackend`. `advance` does a piece of the running burst."""

    def __init__(self, memories: list[I64], page_sizes: list[int], scheme: str, key: int) -> None:
        super().__init__(memories, page_sizes, scheme, key)
        self.items_launched = 0
        self.bursts = 0
        self._running: Generator[None, None, BurstResult] | None = None
        self._result: BurstResult | None = None

    def start(self, burst: Burst) -> None:
        """Queues a burst."""
        assert self._running is None
        self._result = None
        self.bursts += 1
        for work in burst.works:
            if work.stamps is not None:
                # Page 0 is reserved: its slots may be scanned, and are never stamped for good.
                size = self.page_sizes[work.group]
                self.items_launched += int(np.count_nonzero(expand_runs(work.stamps.runs, size)[0] >= size))
        self._running = self.run_slowly(burst, chunk=self.chunk)

    chunk = 256
    """Slots that one piece reads."""

    @property
    def busy(self) -> bool:
        """Whether a burst runs."""
        return self._running is not None

    def advance(self, pieces: int) -> None:
        """Some more of the running burst."""
        if self._running is None:
            return
        try:
            for _ in range(pieces):
                next(self._running)
        except StopIteration as stop:
            self._running, self._result = None, stop.value

    def poll(self) -> BurstResult | None:
        """The result once, when the burst is over."""
        return self._result

    def locate(self, *_: Any, **__: Any) -> None:
        """No change is located: findings are taken from the core."""

    def close(self) -> None:
        """Nothing to give back."""

"""When the next burst may run: each tick, unless that would cost more than the budget."""

from __future__ import annotations


class Pace:
    """Stretches ticks so that bursts take at most a share of the time.

    Args:
        tick: seconds between bursts where the budget allows.
        share: largest share (above 0, up to 1) of the time that bursts may take.
    """

    def __init__(self, *, tick: float, share: float) -> None:
        self._tick = tick
        self._share = share
        self._next_tick = 0.0
        self._paid_until = 0.0

    @property
    def next_at(self) -> float:
        """When the next regular burst may start."""
        return max(self._next_tick, self._paid_until)

    def spent(self, started: float, busy: float) -> None:
        """A burst that started at `started` took `busy` seconds: it is paid for by the pause behind it."""
        self._paid_until = max(self._paid_until, started) + busy / self._share

    def ticked(self, now: float) -> None:
        """A regular burst starts, or there was nothing to do."""
        self._next_tick = now + self._tick

"""When the next burst may run: each tick, unless that would cost more than the budget."""

from __future__ import annotations

SLICE_SECONDS = 0.00027
"""What one burst costs an engine that shares the GPU by time slices, whatever the burst's size (one H200)."""
LAUNCH_SECONDS = 0.00012
"""What each launch added when launches and copies came one by one from the host (same GPU, measured with
benchmarks/engine_loss.py). A burst is one graph now: an upper bound, until that is measured."""
READ_BYTES_PER_SECOND = 1e12
"""Reading speed that every data centre GPU reaches; while the burst reads, the engine waits."""


def engine_loss(*, launches: int, bytes_read: int, busy: float) -> float:
    """Seconds of engine time that a burst cost on a GPU, never more than the `busy` seconds that it took.

    The time between a burst's first and last event is no measure of it: most of that is waiting for the host and for
    the engine's own slices.
    """
    return min(busy, SLICE_SECONDS + LAUNCH_SECONDS * launches + bytes_read / READ_BYTES_PER_SECOND)


class Pace:
    """Stretches ticks so that bursts take at most a share of the time.

    Args:
        tick: seconds between bursts where the budget allows.
        share: largest share (above 0, up to 1) of the time that bursts and client may take.
    """

    def __init__(self, *, tick: float, share: float) -> None:
        self._tick = tick
        self._budget = share
        self._share = share
        self._next_tick = 0.0
        self._paid_until = 0.0

    @property
    def next_at(self) -> float:
        """When the next regular burst may start."""
        return max(self._next_tick, self._paid_until)

    def client_takes(self, share: float) -> None:
        """The client takes this share of the engine's time out of the same budget; half of it stays for bursts, or a
        dear client would blind the watch."""
        self._share = max(self._budget - share, self._budget / 2)

    def spent(self, started: float, busy: float) -> None:
        """A burst that started at `started` took `busy` seconds: it is paid for by the pause behind it."""
        self._paid_until = max(self._paid_until, started) + busy / self._share

    def ticked(self, now: float) -> None:
        """A regular burst starts, or there was nothing to do."""
        self._next_tick = now + self._tick

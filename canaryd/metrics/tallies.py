"""Counters that never go backwards, though what counts them is restarted.

A worker reports what its counters stand at since it was started or a session was attached. Here the last report of each
source is kept apart from the sum of all sources that ended, so that a value seen at `/metrics` only ever grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from canaryd.control.messages import Distribution, Series

Key = tuple[str, tuple[str, ...]]
"""Metric name and the values of its own labels."""


@dataclass
class Histogram:
    """`counts[i]` observations between `bounds[i-1]` and `bounds[i]`, the last above all bounds; not cumulative."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float

    def add(self, other: Distribution | Histogram) -> None:
        """Add what `other` observed. Raises ValueError if its bounds differ."""
        if other.bounds != self.bounds or len(other.counts) != len(self.counts):
            raise ValueError(f"histogram bounds differ: {other.bounds} and {self.bounds}")
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


@dataclass
class _Current:
    counters: dict[Key, float] = field(default_factory=dict)
    distributions: dict[str, Distribution] = field(default_factory=dict)


class Tally:
    """The counters and histograms of one owner (an engine's pool, a worker, the daemon)."""

    def __init__(self) -> None:
        self._counters: Counter[Key] = Counter()
        self._histograms: dict[str, Histogram] = {}
        self._current: dict[bytes, _Current] = {}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Count something that the supervisor itself saw."""
        self._counters[name, labels] += by  # type: ignore[assignment]

    def report(self, source: bytes, counters: Iterable[Series], distributions: Iterable[Distribution] = ()) -> None:
        """Replace what `source` reported before."""
        self._current[source] = _Current(
            {(each.name, each.labels): each.value for each in counters}, {each.name: each for each in distributions}
        )

    def value(self, source: bytes, name: str) -> float:
        """The sum over all labels of what `source` last reported under `name`."""
        current = self._current.get(source)
        return sum(value for key, value in current.counters.items() if key[0] == name) if current else 0.0

    def total(self, name: str) -> float:
        """The sum over all labels and sources."""
        return sum(value for key, value in self.counters().items() if key[0] == name)

    def retire(self, source: bytes) -> None:
        """`source` ended: what it last reported stays in the sums."""
        current = self._current.pop(source, None)
        if current is None:
            return
        for key, value in current.counters.items():
            self._counters[key] += value  # type: ignore[assignment]
        for name, distribution in current.distributions.items():
            _add(self._histograms, name, distribution)

    def counters(self) -> dict[Key, float]:
        """All counters: those of ended sources, and what the living ones last reported."""
        sums: dict[Key, float] = dict(self._counters)
        for current in self._current.values():
            for key, value in current.counters.items():
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def histograms(self) -> dict[str, Histogram]:
        """All histograms, by name, summed in the same way."""
        sums = {name: Histogram(each.bounds, list(each.counts), each.total) for name, each in self._histograms.items()}
        for current in self._current.values():
            for name, distribution in current.distributions.items():
                _add(sums, name, distribution)
        return sums


def _add(histograms: dict[str, Histogram], name: str, distribution: Distribution) -> None:
    if name in histograms:
        histograms[name].add(distribution)
    else:
        histograms[name] = Histogram(distribution.bounds, list(distribution.counts), distribution.total)

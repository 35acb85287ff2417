"""Suspects: mismatches that wait for their second read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.links import LinkItems


@dataclass(kw_only=True)
class ContentSuspects:
    """Slots of one group whose bytes differed from their stamp, [n] each."""

    group: int
    slots: I64
    generations: I64
    first_seen: float
    due: float
    in_flight: bool = field(default=False)

    @property
    def size(self) -> int:
        """How many."""
        return int(self.slots.size)


@dataclass(kw_only=True)
class LinkSuspects:
    """Links of one group that did not hold."""

    group: int
    items: LinkItems
    first_seen: float
    due: float
    in_flight: bool = field(default=False)

    @property
    def size(self) -> int:
        """How many."""
        return int(self.items.slots.size)


Suspects = ContentSuspects | LinkSuspects


class SuspectList:
    """All suspects of one attachment, in batches of one judgement each.

    Args:
        limit: suspects kept at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.batches: list[Suspects] = []

    @property
    def count(self) -> int:
        """Suspects that wait."""
        return sum(batch.size for batch in self.batches)

    def room(self) -> int:
        """How many more may be added."""
        return max(0, self._limit - self.count)

    def add(self, batch: Suspects) -> None:
        """Keeps a batch until it is judged again."""
        if batch.size:
            self.batches.append(batch)

    def remove(self, batch: Suspects) -> None:
        """The batch was judged, or dropped."""
        self.batches = [other for other in self.batches if other is not batch]

    def due(self, now: float) -> list[Suspects]:
        """Batches whose second read is due and not under way."""
        return [batch for batch in self.batches if not batch.in_flight and batch.due <= now]

    def next_due(self) -> float | None:
        """When the next second read is due."""
        return min((batch.due for batch in self.batches if not batch.in_flight), default=None)

    def clear(self) -> int:
        """Forgets all; how many."""
        count = self.count
        self.batches = []
        return count


def concatenated(parts: list[I64]) -> I64:
    """All of `parts`, possibly none."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

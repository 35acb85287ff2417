"""Named copies inside a group: pairs of slots whose stamps must be equal once both are final."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.columns import Mask, pages_of
from canaryd.watch.ledger import Ledger
from canaryd.watch.report import SlotState

MAX_PAIRS = 1 << 16
"""Pairs of one group that wait for their stamps."""

_TO_COME = np.zeros(len(SlotState), dtype=np.bool_)
_TO_COME[[SlotState.PENDING, SlotState.PROVISIONAL]] = True
_COPIED = _TO_COME.copy()
_COPIED[SlotState.SETTLED] = True


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Copies as of message `seqs`, with the generations that both sides had then. All int64 [n]."""

    sources: I64
    destinations: I64
    source_generations: I64
    generations: I64
    seqs: I64

    def take(self, index: I64 | Mask) -> Pairs:
        """The elements at `index`."""
        return Pairs(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})

    @staticmethod
    def joined(parts: list[Pairs]) -> Pairs:
        """All parts, one after the other (at least one)."""
        return Pairs(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in Pairs.__dataclass_fields__}
        )


class Copies:
    """Pairs of one group that are still to be compared.

    Args:
        ledger: the group's.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._parts: list[Pairs] = []
        self.waiting = 0

    def copied(self, sources: I64, destinations: I64, op: int) -> Mask:
        """Which pairs [n] can be judged, asked before the destinations change: content that is known, of sources that
        the same `op` neither writes nor copies to, since nothing says what came first."""
        ledger = self._ledger
        chosen: Mask = _COPIED[ledger.state[sources]] & (ledger.last_op[sources] != op)
        unique, counts = np.unique(destinations, return_counts=True)
        return chosen & ~np.isin(sources, unique) & ~np.isin(destinations, unique[counts > 1])

    def add(self, sources: I64, destinations: I64, seq: int) -> int:
        """Copies [n] that message `seq` named, their destinations' generations raised; how many there is no room
        for."""
        room = MAX_PAIRS - self.waiting
        self._keep(
            Pairs(
                sources=sources[:room],
                destinations=destinations[:room],
                source_generations=self._ledger.generation[sources[:room]],
                generations=self._ledger.generation[destinations[:room]],
                seqs=np.full(min(room, sources.size), seq),
            )
        )
        return max(0, int(sources.size) - room)

    def _keep(self, pairs: Pairs) -> None:
        if pairs.sources.size:
            self._parts.append(pairs)
            self.waiting += int(pairs.sources.size)

    def put_back(self, pairs: Pairs) -> None:
        """The burst that was to compare `pairs` was lost."""
        self._keep(pairs)

    def clear(self) -> None:
        """Forgets all pairs."""
        self._parts.clear()
        self.waiting = 0

    def take(self, limit: int) -> Pairs | None:
        """At most `limit` pairs with both stamps final. Those that a later write or free made moot are dropped."""
        if not self._parts:
            return None
        pairs = Pairs.joined(self._parts)
        self.clear()
        ledger = self._ledger
        same = self.unchanged(pairs)
        states = ledger.state[pairs.sources], ledger.state[pairs.destinations]
        final = (states[0] == SlotState.SETTLED) & (states[1] == SlotState.SETTLED)
        wait = same & ~final & _COPIED[states[0]] & _COPIED[states[1]]
        ready = np.flatnonzero(same & final)
        wait[ready[limit:]] = True
        self._keep(pairs.take(wait))
        return pairs.take(ready[:limit]) if ready.size else None

    def unchanged(self, pairs: Pairs) -> Mask:
        """Whether nothing was said of either side since the copy. [n]"""
        ledger = self._ledger
        same: Mask = ledger.generation[pairs.sources] == pairs.source_generations
        same &= ledger.generation[pairs.destinations] == pairs.generations
        for slots in (pairs.sources, pairs.destinations):
            same &= ledger.freed_seq[pages_of(slots, ledger.page_size)] <= pairs.seqs
        return same

"""Pace: which settled slots a burst reads, so that each is read within the promised age."""

from __future__ import annotations

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.columns import Mask
from canaryd.watch.group import Group
from canaryd.watch.report import SlotState

MARGIN = 0.8
"""A pass aims at this share of the promised age: the rest absorbs late ticks."""


class Cursor:
    """A round through the pages of a group in their order."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, eligible: Mask, count: int) -> I64:
        """The next `count` slots of those in `eligible` [n], sorted."""
        ahead = np.flatnonzero(eligible[self._next :])[:count] + self._next
        if ahead.size < count and self._next:
            wrapped = np.flatnonzero(eligible[: self._next])[: count - ahead.size]
            last = wrapped if wrapped.size else ahead
            if last.size:
                self._next = int(last[-1]) + 1
            return np.concatenate([wrapped, ahead])
        if ahead.size:
            self._next = int(ahead[-1]) + 1
        return ahead


class Pace:
    """Content round-robin of one group. Ages in seconds."""

    def __init__(self, group: Group, max_age_live: float, max_age_idle: float) -> None:
        self._group = group
        self._ages = (max_age_live, max_age_idle)
        self._live, self._idle, self._doubt = Cursor(), Cursor(), Cursor()

    def doubts(self, limit: int) -> I64:
        """At most `limit` doubted slots to compare, sorted."""
        ledger = self._group.ledger
        doubted = ledger.state == SlotState.DOUBT
        return self._doubt.take(self._uncovered(doubted), limit) if doubted.any() else np.zeros(0, dtype=np.int64)

    def select(self, limit: int, elapsed: float) -> tuple[I64, I64]:
        """Live and idle slots to read now, each sorted, at most `limit` together; `elapsed` since the last time."""
        group = self._group
        settled = self._uncovered(group.ledger.state == SlotState.SETTLED)
        held = group.rows.holders > 0
        live = settled & (np.repeat(held, group.page_size) if group.page_size > 1 else held)
        live_count = int(np.count_nonzero(live))
        idle_count = int(np.count_nonzero(settled)) - live_count
        live_quota = min(limit, self._quota(live_count, self._ages[0], elapsed))
        idle_quota = min(limit - live_quota, self._quota(idle_count, self._ages[1], elapsed))
        none = np.zeros(0, dtype=np.int64)
        live_slots = self._live.take(live, live_quota) if live_quota else none
        idle_slots = self._idle.take(settled & ~live, idle_quota) if idle_quota else none
        return live_slots, idle_slots

    def _uncovered(self, mask: Mask) -> Mask:
        ledger = self._group.ledger
        if ledger.scopes:
            mask &= np.repeat(ledger.covered == 0, self._group.page_size)
        return mask

    @staticmethod
    def _quota(count: int, age: float, elapsed: float) -> int:
        return min(count, int(np.ceil(count * elapsed / (MARGIN * age))))

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
    """A round through the slots of a group, page by page."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._next = 0

    def take(self, eligible: Mask, count: int, limit: int) -> I64:
        """The next `count` slots of those in `eligible` [n], sorted; up to `limit` to end with a whole page, so that
        the slots of a wiped page are seen together."""
        ahead = np.flatnonzero(eligible[self._next :]) + self._next
        if ahead.size >= count:
            chosen = self._whole_pages(ahead, count, limit)
            self._next = int(chosen[-1]) + 1 if chosen.size else self._next
            return chosen
        behind = np.flatnonzero(eligible[: self._next])
        wrapped = self._whole_pages(behind, min(count, limit) - ahead.size, limit - ahead.size)
        last = wrapped if wrapped.size else ahead
        if last.size:
            self._next = int(last[-1]) + 1
        return np.concatenate([wrapped, ahead])

    def _whole_pages(self, slots: I64, count: int, limit: int) -> I64:
        if count <= 0:
            return slots[:0]
        if count >= slots.size:
            return slots[:limit]
        end = (int(slots[count - 1]) // self._page_size + 1) * self._page_size
        return slots[: min(int(np.searchsorted(slots, end)), limit)]


class Pace:
    """Content round-robin of one group. Ages in seconds."""

    def __init__(self, group: Group, max_age_live: float, max_age_idle: float) -> None:
        self._group = group
        self._ages = (max_age_live, max_age_idle)
        self._live, self._idle, self._doubt = (Cursor(group.page_size) for _ in range(3))
        self._owed = 0.0

    @property
    def doubted(self) -> int:
        """Doubted slots."""
        return int(np.count_nonzero(self._group.ledger.state == SlotState.DOUBT))

    def doubts(self, limit: int) -> I64:
        """At most `limit` doubted slots to compare, sorted."""
        ledger = self._group.ledger
        doubted = ledger.state == SlotState.DOUBT
        return (
            self._doubt.take(self._uncovered(doubted), limit, limit) if doubted.any() else np.zeros(0, dtype=np.int64)
        )

    def select(self, limit: int, elapsed: float) -> tuple[I64, I64]:
        """Live and idle slots to read now, each sorted, at most `limit` together; `elapsed` since the last time."""
        group = self._group
        settled = self._uncovered(group.ledger.state == SlotState.SETTLED)
        held = group.rows.holders > 0
        live = settled & (np.repeat(held, group.page_size) if group.page_size > 1 else held)
        live_count = int(np.count_nonzero(live))
        idle_count = int(np.count_nonzero(settled)) - live_count
        live_quota = self._quota(live_count, self._ages[0], elapsed)
        idle_quota = self._quota(idle_count, self._ages[1], elapsed)
        if live_quota + idle_quota > limit:
            # Not both promises can be kept: both are late by the same factor, and neither waits for ever.
            share = limit * live_quota / (live_quota + idle_quota) + self._owed
            live_quota = min(int(share), limit)
            self._owed = share - live_quota
            idle_quota = limit - live_quota
        none = np.zeros(0, dtype=np.int64)
        live_slots = self._live.take(live, live_quota, limit - idle_quota) if live_quota else none
        left = limit - live_slots.size
        idle_slots = self._idle.take(settled & ~live, idle_quota, left) if idle_quota else none
        return live_slots, idle_slots

    def _uncovered(self, mask: Mask) -> Mask:
        ledger = self._group.ledger
        if ledger.scopes:
            mask &= np.repeat(ledger.covered == 0, self._group.page_size)
        return mask

    @staticmethod
    def _quota(count: int, age: float, elapsed: float) -> int:
        return min(count, int(np.ceil(count * elapsed / (MARGIN * age))))

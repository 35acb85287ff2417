"""Planning a burst: new stamps, second reads, doubts, links, content round-robin, within its budgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canaryd.watch.burst import I64, Burst, CompareWork, CopyWork, GroupWork, StampWork
from canaryd.watch.columns import Mask
from canaryd.watch.counters import Counters, Dismissal, VerifyMode
from canaryd.watch.group import Group
from canaryd.watch.launched import MODE_CODE, ComparePart, GroupPart, LaunchedBurst, LinkPart, StampPart
from canaryd.watch.ledger import HAS_CHAIN, HAS_POSITION, REPLACES
from canaryd.watch.links import LinkItems, LinkWalk
from canaryd.watch.pace import Pace
from canaryd.watch.policy import Policy
from canaryd.watch.report import SlotState
from canaryd.watch.runs import make_runs, run_starts, unordered_runs
from canaryd.watch.suspects import ContentSuspects, LinkSuspects, SuspectList

_RESERVED_PER_BURST = 16
_COPIES_PER_BURST = 4096
STAMP_SHARE = 0.75
"""New stamps take at most this share of a burst's bytes, so that the round-robin never stops."""


class Planner:
    """Builds bursts for all groups.

    Args:
        groups: state of each group.
        policy: pace and budgets.
        suspects: what waits for a second read.
        counters: totals to add to.
    """

    def __init__(self, groups: Sequence[Group], policy: Policy, suspects: SuspectList, counters: Counters) -> None:
        self._groups = groups
        self._policy = policy
        self._suspects = suspects
        self._counters = counters
        self.walks = [LinkWalk(group, policy.max_age_live) for group in groups]
        self._paces = [Pace(group, policy.max_age_live, policy.max_age_idle) for group in groups]
        self._full_at: float | None = None
        self._number = 0
        self._turn = 0

    def plan(self, now: float) -> tuple[Burst, LaunchedBurst] | None:
        """The next burst, or None if there is nothing to do. Between ticks only second reads are planned."""
        full = self._full_at is None or now - self._full_at >= self._policy.tick_seconds / 2
        parts = {group.number: GroupPart(group=group.number) for group in self._groups}
        seconds = self._second_reads(parts, now)
        if full:
            self._fill(parts, now)
        elif not seconds:
            return None
        works = []
        launched = []
        for group in self._groups:
            part = parts[group.number]
            if part.stamps or part.compare or part.links or part.copies:
                works.append(self._work(group, part))
                launched.append(part)
        if not works:
            return None
        self._number += 1
        burst = Burst(number=self._number, works=tuple(works))
        return burst, LaunchedBurst(number=self._number, launched_at=now, parts=launched)

    def forget_pace(self) -> None:
        """Nothing was read for a while, on purpose: the next burst is an ordinary one."""
        self._full_at = None

    # --- second reads -------------------------------------------------------------------------------------------------

    def _second_reads(self, parts: dict[int, GroupPart], now: float) -> bool:
        any_planned = False
        for batch in self._suspects.due(now):
            part = parts[batch.group]
            if isinstance(batch, ContentSuspects):
                self._still_suspect(batch)
            else:
                self._still_linked(batch)
            if not batch.size:
                self._suspects.remove(batch)
                continue
            batch.in_flight = True
            any_planned = True
            if isinstance(batch, ContentSuspects):
                self._add_compare(part, batch.slots, VerifyMode.SECOND_READ, batch)
            else:
                self._add_links(part, batch.items, batch)
        return any_planned

    def _dismiss(self, reason: Dismissal, mask: Mask) -> None:
        self._counters.dismissed[reason] += int(np.count_nonzero(mask))

    def _still_suspect(self, batch: ContentSuspects) -> None:
        """Drops what a legal write, a free or a scope made moot since the first read."""
        ledger = self._groups[batch.group].ledger
        rewritten = ledger.generation[batch.slots] != batch.generations
        freed = ~rewritten & (ledger.state[batch.slots] == SlotState.FREED)
        suspect = ~rewritten & (ledger.state[batch.slots] == SlotState.SUSPECT)
        covered = suspect & ledger.is_covered(batch.slots)
        self._dismiss(Dismissal.UNCONFIRMED, rewritten)
        self._dismiss(Dismissal.FREED, freed)
        self._dismiss(Dismissal.SCOPE, covered)
        self._dismiss(Dismissal.SUPERSEDED, ~rewritten & ~freed & ~suspect)
        ledger.state[batch.slots[covered]] = SlotState.SETTLED
        keep = suspect & ~covered
        batch.slots, batch.generations = batch.slots[keep], batch.generations[keep]

    def _still_linked(self, batch: LinkSuspects) -> None:
        """Drops links whose row or slots changed since the first check."""
        ledger, items = self._groups[batch.group].ledger, batch.items
        row, content = self.walks[batch.group].unchanged(items)
        settled = ledger.state[items.slots] == SlotState.SETTLED
        settled &= (items.previous < 0) | (ledger.state[np.maximum(items.previous, 0)] == SlotState.SETTLED)
        covered = ledger.is_covered(items.slots)
        self._dismiss(Dismissal.ROW_CHANGED, ~row)
        self._dismiss(Dismissal.UNCONFIRMED, row & ~content)
        self._dismiss(Dismissal.SUPERSEDED, row & content & ~settled)
        self._dismiss(Dismissal.SCOPE, row & content & settled & covered)
        batch.items = items.take(row & content & settled & ~covered)

    # --- a tick's work ------------------------------------------------------------------------------------------------

    def _fill(self, parts: dict[int, GroupPart], now: float) -> None:
        policy = self._policy
        elapsed = policy.tick_seconds if self._full_at is None else now - self._full_at
        self._full_at = now
        stamps_left = policy.max_stamps_per_burst
        links_left = policy.max_link_items_per_burst
        stamp_bytes = int(policy.bytes_per_burst * STAMP_SHARE)
        bytes_left = policy.bytes_per_burst
        # Each group is first in its turn, so that no budget starves the last one.
        self._turn = (self._turn + 1) % len(self._groups)
        order = [*self._groups[self._turn :], *self._groups[: self._turn]]
        for group in order:
            part = parts[group.number]
            count = min(stamps_left, max(1, stamp_bytes // group.slot_bytes)) if stamps_left else 0
            slots = group.ledger.take_pending(count) if count else np.zeros(0, dtype=np.int64)
            part.copies = group.copies.take(_COPIES_PER_BURST)
            part.stamps = self._stamp_part(group, slots)
            if slots.size:
                stamps_left -= slots.size
                stamp_bytes = max(0, stamp_bytes - slots.size * group.slot_bytes)
                bytes_left -= slots.size * group.slot_bytes
            items = self.walks[group.number].select(links_left, now) if links_left else None
            if items is not None:
                self._add_links(part, items, None)
                links_left -= int(items.slots.size)
        for group in order:
            part = parts[group.number]
            pace = self._paces[group.number]
            limit = max(0, bytes_left) // group.slot_bytes
            if group is order[0]:
                # Slots that are larger than what stamps leave of the budget are read one by one.
                limit = max(1, limit)
            # Doubts have half of the budget, and more where the round-robin leaves it.
            live, idle = pace.select(limit - min(pace.doubted, (limit + 1) // 2), elapsed)
            doubts = pace.doubts(limit - live.size - idle.size)
            self._add_compare(part, doubts, VerifyMode.DOUBT, None)
            self._add_compare(part, live, VerifyMode.LIVE, None)
            self._add_compare(part, idle, VerifyMode.IDLE, None)
            bytes_left -= int(doubts.size + live.size + idle.size) * group.slot_bytes

    def _stamp_part(self, group: Group, slots: I64) -> StampPart | None:
        """Pending `slots` [n], sorted, and some reserved ones: stamping these scans them, and nothing else."""
        ledger = group.ledger
        reserved = ledger.next_reserved(_RESERVED_PER_BURST)
        if reserved.size:
            slots = np.sort(np.concatenate([slots, reserved]))
        if not slots.size:
            return None
        replaces = (ledger.flags[slots] & REPLACES) != 0
        # Only its first stamp finds the old one still there.
        ledger.flags[slots] &= ~np.uint8(REPLACES)
        return StampPart(
            slots=slots,
            generations=ledger.generation[slots],
            replaces=replaces,
            reserved=ledger.state[slots] == SlotState.RESERVED,
        )

    def _add_compare(self, part: GroupPart, slots: I64, mode: VerifyMode, batch: ContentSuspects | None) -> None:
        if not slots.size:
            return
        generations = self._groups[part.group].ledger.generation[slots]
        modes = np.full(slots.size, MODE_CODE[mode], dtype=np.uint8)
        if part.compare is None:
            part.compare = ComparePart(slots=slots, generations=generations, modes=modes, batches=[])
            first = 0
        else:
            first = int(part.compare.slots.size)
            part.compare.slots = np.concatenate([part.compare.slots, slots])
            part.compare.generations = np.concatenate([part.compare.generations, generations])
            part.compare.modes = np.concatenate([part.compare.modes, modes])
        if batch is not None:
            part.compare.batches.append((batch, first, first + int(slots.size)))

    @staticmethod
    def _add_links(part: GroupPart, items: LinkItems, batch: LinkSuspects | None) -> None:
        if part.links is None:
            part.links = LinkPart(items=items, batches=[])
            first = 0
        else:
            first = int(part.links.items.slots.size)
            part.links.items = LinkItems.joined([part.links.items, items])
        if batch is not None:
            part.links.batches.append((batch, first, first + int(items.slots.size)))

    def _work(self, group: Group, part: GroupPart) -> GroupWork:
        return GroupWork(
            group=group.number,
            stamps=self._stamp_work(group, part.stamps) if part.stamps else None,
            compare=CompareWork(runs=unordered_runs(part.compare.slots, group.page_size)) if part.compare else None,
            links=self.walks[group.number].work(part.links.items) if part.links else None,
            copies=CopyWork(sources=part.copies.sources, destinations=part.copies.destinations)
            if part.copies
            else None,
        )

    @staticmethod
    def _stamp_work(group: Group, part: StampPart) -> StampWork:
        """Runs go on where position and chain do. Where these are not known, the record's position and hash mean
        nothing and are never compared, but the position must not be negative."""
        ledger, slots = group.ledger, part.slots
        ledger.state[slots[~part.reserved]] = SlotState.PROVISIONAL
        flags = ledger.flags[slots]
        placed = (flags & HAS_POSITION) != 0
        chained = (flags & HAS_CHAIN) != 0
        positions = np.where(placed, ledger.position[slots], 0)
        seeds = np.where(chained, ledger.prev_hash[slots], 0)
        breaks = np.zeros(slots.size, dtype=np.bool_)
        both = placed[1:] & placed[:-1]
        breaks[1:] = (placed[1:] != placed[:-1]) | (both & (positions[1:] != positions[:-1] + 1))
        linked = chained[1:] & chained[:-1]
        breaks[1:] |= (chained[1:] != chained[:-1]) | (linked & (seeds[1:] != ledger.after[slots[:-1]]))
        breaks[1:] |= slots[1:] != slots[:-1] + 1
        starts = run_starts(slots, group.page_size, breaks)
        return StampWork(
            runs=make_runs(slots, positions, starts, group.page_size),
            tokens=np.where(placed, ledger.token[slots], -1),
            generations=part.generations,
            seeds=seeds[starts],
        )

"""Judging a burst once the stream has caught up with it: stamps become final, mismatches suspects or findings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from canary_kernels.constants import NOTE_NONFINITE, NOTE_UNCHANGED

from canaryd.watch.burst import (
    FAIL_CHAIN,
    FAIL_POSITION,
    FAIL_RANGE,
    FAIL_TOKEN,
    I64,
    CompareMismatches,
    CopyMismatches,
    LinkMismatches,
    StampNotes,
)
from canaryd.watch.columns import Mask
from canaryd.watch.copies import Pairs
from canaryd.watch.counters import Check, Counters, Dismissal, Oddity, Rebless, StampDrop, VerifyMode
from canaryd.watch.findings import Evidence, FindingLog, Kind
from canaryd.watch.group import Group
from canaryd.watch.launched import MODE_CODE, MODES, ComparePart, LaunchedBurst, LinkPart, StampPart
from canaryd.watch.ledger import REVIVED
from canaryd.watch.links import LinkWalk
from canaryd.watch.policy import Policy
from canaryd.watch.report import SlotState
from canaryd.watch.suspects import ContentSuspects, LinkSuspects, SuspectList

_COUNTS_AS = (
    # The coarsest difference names the check: content of another position, of another token, of another history.
    (FAIL_RANGE, Check.RANGE),
    (FAIL_POSITION, Check.POSITION),
    (FAIL_TOKEN, Check.TOKEN),
    (FAIL_CHAIN, Check.CHAIN),
)


class Judge:
    """Applies a burst's results so that nothing that a named write, an open scope or a
    free could explain is ever used.

    Args:
        groups, walks: state and link walk of each group.
        policy: limits.
        suspects: what waits for a second read.
        counters, log: totals, and where findings go.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        walks: Sequence[LinkWalk],
        *,
        policy: Policy,
        suspects: SuspectList,
        counters: Counters,
        log: FindingLog,
    ) -> None:
        self._groups = groups
        self._walks = walks
        self._policy = policy
        self._suspects = suspects
        self._counters = counters
        self._log = log

    def judge(self, burst: LaunchedBurst, now: float) -> None:
        """All results of `burst`."""
        self._log.start(now)
        for part in burst.parts:
            group = self._groups[part.group]
            result = burst.result_of(part.group)
            if part.stamps is not None:
                self._stamps(group, part.stamps, result.stamps if result else None, burst, now)
            if part.compare is not None:
                self._compare(group, part.compare, result.compare if result else None, burst, now)
            if part.links is not None:
                self._links(group, part.links, result.links if result else None, burst, now)
            if part.copies is not None and result and result.copies:
                self._copies(group, part.copies, result.copies, burst, now)

    def unused(self, burst: LaunchedBurst, drop: StampDrop, dismissal: Dismissal) -> None:
        """The burst's results are not used: stamps are made again, second reads count as dismissed."""
        for part in burst.parts:
            ledger = self._groups[part.group].ledger
            if part.stamps is not None:
                slots = part.stamps.slots
                mine = (ledger.generation[slots] == part.stamps.generations) & (
                    ledger.state[slots] == SlotState.PROVISIONAL
                )
                self._counters.stamps_dropped[drop] += part.stamps.size
                ledger.state[slots[mine]] = SlotState.PENDING
                ledger.enqueue(slots[mine])
            for batch, _, _ in part.compare.batches if part.compare else []:
                back = batch.slots[self._standing(self._groups[part.group], batch)]
                ledger.state[back] = SlotState.SETTLED
                self._counters.dismissed[dismissal] += batch.size
                self._suspects.remove(batch)
            if part.copies is not None:
                self._groups[part.group].copies.put_back(part.copies)
            if part.links is not None:
                self._walks[part.group].walk_again(part.links.items)
                for link_batch, _, _ in part.links.batches:
                    self._counters.dismissed[dismissal] += link_batch.size
                    self._suspects.remove(link_batch)

    @staticmethod
    def _standing(group: Group, batch: ContentSuspects) -> Mask:
        standing: Mask = group.ledger.generation[batch.slots] == batch.generations
        standing &= group.ledger.state[batch.slots] == SlotState.SUSPECT
        return standing

    # --- stamps -------------------------------------------------------------------------------------------------------

    def _stamps(
        self, group: Group, part: StampPart, notes: StampNotes | None, burst: LaunchedBurst, now: float
    ) -> None:
        ledger, slots, counters = group.ledger, part.slots, self._counters
        same = ledger.generation[slots] == part.generations
        provisional = same & (ledger.state[slots] == SlotState.PROVISIONAL)
        covered = provisional & ledger.is_covered(slots)
        freed = same & ~provisional & ~part.reserved
        counters.stamps_dropped[StampDrop.GENERATION] += int(np.count_nonzero(~same))
        counters.stamps_dropped[StampDrop.FREED] += int(np.count_nonzero(freed))
        counters.stamps_dropped[StampDrop.SCOPE] += int(np.count_nonzero(covered))
        ledger.state[slots[covered]] = SlotState.PENDING
        ledger.enqueue(slots[covered])
        kept = provisional & ~covered
        final = slots[kept]
        ledger.state[final] = SlotState.SETTLED
        ledger.verified_at[final] = burst.launched_at
        counters.stamped += int(final.size)
        counters.unguarded_seconds.observe_all(now - ledger.begun_at[final])
        counters.stamp_lag_seconds.observe_all(burst.read_at - ledger.ended_at[final])
        if notes is not None:
            self._notes(group, part, notes, kept=kept, burst=burst, now=now)

    def _notes(
        self, group: Group, part: StampPart, notes: StampNotes, *, kept: Mask, burst: LaunchedBurst, now: float
    ) -> None:
        """`landed` and `nonfinite`, of stamps that became final. What a full list leaves out is not judged."""
        self._counters.oddities[Oddity.TRUNCATED] += notes.truncated > 0
        bits = np.zeros(part.slots.size, dtype=np.int64)
        bits[notes.items] = notes.bits
        strange = (bits & NOTE_NONFINITE) != 0
        scanned = part.slots[part.reserved]
        if scanned.size:
            group.ledger.nonfinite_reserved[scanned] = strange[part.reserved]
        unchanged = part.slots[kept & part.replaces & ((bits & NOTE_UNCHANGED) != 0)]
        group.ledger.state[unchanged] = SlotState.DAMAGED
        found = (
            (Check.LANDED, unchanged, Kind.STALE, "a named write did not change the bytes"),
            (Check.NONFINITE, part.slots[kept & strange], Kind.NONFINITE, "NaN or infinity in a written slot"),
        )
        for check, slots, kind, detail in found:
            self._log.add(
                group,
                check,
                slots,
                rows=np.full(slots.size, -1),
                positions=group.ledger.position[slots],
                now=now,
                first_seen=now,
                burst=burst.number,
                detail=detail,
                kind=kind,
            )

    # --- content ------------------------------------------------------------------------------------------------------

    def _compare(
        self, group: Group, part: ComparePart, seen: CompareMismatches | None, burst: LaunchedBurst, now: float
    ) -> None:
        ledger, n = group.ledger, part.slots.size
        mismatch = np.zeros(n, dtype=np.bool_)
        evidence_at = np.zeros(n, dtype=np.int64)
        # Past the capacity of the list nothing can be said of the slots that it does not name.
        complete = seen is not None and seen.truncated == 0
        if seen is not None:
            mismatch[seen.items] = True
            evidence_at[seen.items] = np.arange(seen.items.size)
        if not complete:
            self._counters.oddities[Oddity.TRUNCATED] += 1
        same = ledger.generation[part.slots] == part.generations
        clean = ~mismatch & same if complete else np.zeros(n, dtype=np.bool_)
        self._count_clean(group, part, clean, burst)
        first = part.modes != MODE_CODE[VerifyMode.SECOND_READ]
        self._first_mismatches(group, part, mismatch & first, now)
        for batch, begin, end in part.batches:
            items = np.arange(begin, end)
            evidence = None
            if seen is not None and mismatch[items].any():
                evidence = Evidence(
                    stored_digests=seen.stored_digests,
                    seen_digests=seen.seen_digests,
                    stored_sums=seen.stored_sums,
                    seen_sums=seen.seen_sums,
                ).take(evidence_at[items])
            self._second_content(
                group, batch, mismatch[items], evidence=evidence, complete=complete, burst=burst, now=now
            )

    def _count_clean(self, group: Group, part: ComparePart, clean: Mask, burst: LaunchedBurst) -> None:
        ledger, slots = group.ledger, part.slots
        counted = clean & np.isin(ledger.state[slots], (SlotState.SETTLED, SlotState.SUSPECT, SlotState.DOUBT))
        good = slots[counted]
        ledger.verified_at[good] = np.maximum(ledger.verified_at[good], burst.launched_at)
        for code, count in enumerate(np.bincount(part.modes[counted], minlength=len(MODES))):
            self._counters.verified[MODES[code]] += int(count)
        self._counters.bytes_verified += int(good.size) * group.slot_bytes
        doubted = good[ledger.state[good] == SlotState.DOUBT]
        # A read from before the doubt says nothing of what happened while the page was free.
        uncovered = doubted[(ledger.doubted_at[doubted] < burst.launched_at) & ~ledger.is_covered(doubted)]
        ledger.state[uncovered] = SlotState.SETTLED
        ledger.flags[uncovered] &= ~np.uint8(REVIVED)

    def _first_mismatches(self, group: Group, part: ComparePart, mismatch: Mask, now: float) -> None:
        index = np.flatnonzero(mismatch)
        if not index.size:
            return
        ledger, slots, counters = group.ledger, part.slots[index], self._counters
        doubt_read = part.modes[index] == MODE_CODE[VerifyMode.DOUBT]
        state = ledger.state[slots]
        same = ledger.generation[slots] == part.generations[index]
        covered = ledger.is_covered(slots)
        usable = same & ~covered
        self._restamp(group, slots[usable & doubt_read & (state == SlotState.DOUBT)], now)
        judged = ~doubt_read
        counters.suspects += int(np.count_nonzero(judged))
        settled = state == SlotState.SETTLED
        freed = same & (state == SlotState.FREED)
        self._dismiss(Dismissal.GENERATION, judged & ~same)
        self._dismiss(Dismissal.FREED, judged & freed)
        self._dismiss(Dismissal.SCOPE, judged & same & ~freed & covered)
        self._dismiss(Dismissal.SUPERSEDED, judged & usable & ~freed & ~settled)
        chosen = np.flatnonzero(judged & usable & settled)
        room = self._suspects.room()
        counters.dismissed[Dismissal.LIMIT] += max(0, int(chosen.size) - room)
        chosen = chosen[:room]
        ledger.state[slots[chosen]] = SlotState.SUSPECT
        self._suspects.add(
            ContentSuspects(
                group=group.number,
                slots=slots[chosen],
                generations=part.generations[index][chosen],
                first_seen=now,
                due=now + self._policy.reread_after,
            )
        )

    def _restamp(self, group: Group, slots: I64, now: float) -> None:
        """Doubted bytes that are not what was stamped: a lost write may have changed them, so they count as new, and
        whose they are is not known."""
        if not slots.size:
            return
        ledger = group.ledger
        ledger.begun_at[slots] = now
        ledger.ended_at[slots] = now
        ledger.state[slots] = SlotState.PENDING
        ledger.enqueue(slots)
        revived = int(np.count_nonzero(ledger.flags[slots] & REVIVED))
        ledger.flags[slots] = 0
        ledger.token[slots] = ledger.position[slots] = -1
        self._counters.reblessed[Rebless.REVIVED] += revived
        self._counters.reblessed[Rebless.GAP] += int(slots.size) - revived

    def _second_content(
        self,
        group: Group,
        batch: ContentSuspects,
        mismatch: Mask,
        *,
        evidence: Evidence | None,
        complete: bool,
        burst: LaunchedBurst,
        now: float,
    ) -> None:
        ledger = group.ledger
        batch.in_flight = False
        self._suspects.remove(batch)
        same = ledger.generation[batch.slots] == batch.generations
        freed = same & (ledger.state[batch.slots] == SlotState.FREED)
        standing = self._standing(group, batch)
        covered = standing & ledger.is_covered(batch.slots)
        usable = standing & ~covered
        clean = usable & ~mismatch & complete
        again = usable & ~mismatch & (not complete)
        confirmed = usable & mismatch
        self._dismiss(Dismissal.UNCONFIRMED, ~same)
        self._dismiss(Dismissal.FREED, freed)
        self._dismiss(Dismissal.SCOPE, covered)
        self._dismiss(Dismissal.NOT_REPRODUCED, clean)
        self._dismiss(Dismissal.SUPERSEDED, same & ~freed & ~standing)
        ledger.state[batch.slots[covered | clean]] = SlotState.SETTLED
        slots = batch.slots[confirmed]
        ledger.state[slots] = SlotState.DAMAGED
        self._log.add(
            group,
            Check.CONTENT,
            slots,
            rows=np.full(slots.size, -1),
            positions=ledger.position[slots],
            now=now,
            first_seen=batch.first_seen,
            burst=burst.number,
            detail="bytes changed without a named write",
            evidence=evidence.take(np.flatnonzero(confirmed)) if evidence else None,
        )
        batch.slots, batch.generations = batch.slots[again], batch.generations[again]
        self._suspects.add(batch)

    # --- links --------------------------------------------------------------------------------------------------------

    def _links(
        self, group: Group, part: LinkPart, seen: LinkMismatches | None, burst: LaunchedBurst, now: float
    ) -> None:
        n = part.items.slots.size
        bits = np.zeros(n, dtype=np.int64)
        complete = seen is not None and seen.truncated == 0
        if seen is not None:
            bits[seen.items] = seen.bits
        second = np.zeros(n, dtype=np.bool_)
        for batch, begin, end in part.batches:
            second[begin:end] = True
            self._second_links(group, batch, bits[begin:end], complete=complete, burst=burst, now=now)
        row, content = self._walks[group.number].unchanged(part.items)
        settled = group.ledger.state[part.items.slots] == SlotState.SETTLED
        if complete:
            self._counters.verified[VerifyMode.LINKS] += int(np.count_nonzero((bits == 0) & content))
        else:
            self._counters.oddities[Oddity.TRUNCATED] += 1
            self._walks[group.number].walk_again(part.items)
        mismatch = (bits != 0) & ~second
        if mismatch.any():
            self._first_links(group, part, bits, mismatch, unchanged=(row, content, settled), now=now)

    def _first_links(
        self, group: Group, part: LinkPart, bits: I64, mismatch: Mask, *, unchanged: tuple[Mask, Mask, Mask], now: float
    ) -> None:
        row, content, settled = unchanged
        items = part.items
        covered = group.ledger.is_covered(items.slots)
        # A broken link to a slot that is itself wrong says nothing about the slot behind it.
        follows = np.zeros(bits.size, dtype=np.bool_)
        follows[1:] = (bits[1:] == FAIL_CHAIN) & ((bits[:-1] & ~FAIL_CHAIN) != 0)
        follows[1:] &= (items.rows[1:] == items.rows[:-1]) & (items.previous[1:] == items.slots[:-1])
        self._counters.suspects += int(np.count_nonzero(mismatch))
        self._dismiss(Dismissal.ROW_CHANGED, mismatch & ~row)
        self._dismiss(Dismissal.GENERATION, mismatch & row & ~content)
        usable = mismatch & row & content
        self._dismiss(Dismissal.SCOPE, usable & covered)
        usable &= ~covered
        self._dismiss(Dismissal.SUPERSEDED, usable & (follows | ~settled))
        chosen = np.flatnonzero(usable & ~follows & settled)
        room = self._suspects.room()
        self._counters.dismissed[Dismissal.LIMIT] += max(0, int(chosen.size) - room)
        self._suspects.add(
            LinkSuspects(
                group=group.number,
                items=items.take(chosen[:room]),
                first_seen=now,
                due=now + self._policy.reread_after,
            )
        )

    def _second_links(
        self, group: Group, batch: LinkSuspects, bits: I64, *, complete: bool, burst: LaunchedBurst, now: float
    ) -> None:
        ledger, items = group.ledger, batch.items
        batch.in_flight = False
        self._suspects.remove(batch)
        row, content = self._walks[group.number].unchanged(items)
        settled = ledger.state[items.slots] == SlotState.SETTLED
        covered = ledger.is_covered(items.slots)
        usable = row & content & settled & ~covered
        self._dismiss(Dismissal.ROW_CHANGED, ~row)
        self._dismiss(Dismissal.UNCONFIRMED, row & ~content)
        self._dismiss(Dismissal.SUPERSEDED, row & content & ~settled)
        self._dismiss(Dismissal.SCOPE, row & content & settled & covered)
        self._dismiss(Dismissal.NOT_REPRODUCED, usable & (bits == 0) & complete)
        left = usable & (bits != 0)
        for bit, check in _COUNTS_AS:
            found = left & ((bits & bit) != 0)
            left &= ~found
            slots = items.slots[found]
            ledger.state[slots] = SlotState.DAMAGED
            self._log.add(
                group,
                check,
                slots,
                rows=items.rows[found],
                positions=items.positions[found],
                now=now,
                first_seen=batch.first_seen,
                burst=burst.number,
                detail="the slot does not hold what its row says",
            )
        batch.items = items.take(usable & (bits == 0) & (not complete))
        self._suspects.add(batch)

    # --- copies -------------------------------------------------------------------------------------------------------

    def _copies(self, group: Group, pairs: Pairs, seen: CopyMismatches, burst: LaunchedBurst, now: float) -> None:
        """Stamps that differ, both still final. No second read: neither stamp changes while they stand."""
        ledger, named = group.ledger, pairs.take(seen.items)
        usable = group.copies.unchanged(named)
        for slots in (named.sources, named.destinations):
            usable &= (ledger.state[slots] == SlotState.SETTLED) & ~ledger.is_covered(slots)
        index = np.flatnonzero(usable)
        slots = named.destinations[index]
        ledger.state[slots] = SlotState.DAMAGED
        evidence = Evidence(
            stored_digests=seen.source_digests,
            seen_digests=seen.digests,
            stored_sums=seen.source_sums,
            seen_sums=seen.sums,
        )
        self._log.add(
            group,
            Check.COPY,
            slots,
            rows=np.full(slots.size, -1),
            positions=ledger.position[slots],
            now=now,
            first_seen=now,
            burst=burst.number,
            detail="a named copy does not hold its source's content",
            evidence=evidence.take(index),
        )

    def _dismiss(self, reason: Dismissal, mask: Mask) -> None:
        self._counters.dismissed[reason] += int(np.count_nonzero(mask))

"""Findings: the only thing that counts as corruption."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.columns import pages_of
from canaryd.watch.counters import Check, Counters
from canaryd.watch.group import Group
from canaryd.watch.rows import UNKNOWN_ROW

MAX_RANGES = 16
"""Slot ranges and pages that one finding lists; `slot_count` is exact."""


class Kind(StrEnum):
    """Class of a finding.

    bit_flip, word: one 8-byte word changed, in a few bits or many. row: more of one slot did. page: all of one page or
    more. zeroed: every byte is zero. nonfinite: it holds NaN or infinity. misdirected: it equals the content stamped
    for another slot. stale: it equals the slot's own earlier content. unknown: not a change of bytes.
    """

    BIT_FLIP = "bit_flip"
    WORD = "word"
    ROW = "row"
    PAGE = "page"
    ZEROED = "zeroed"
    NONFINITE = "nonfinite"
    MISDIRECTED = "misdirected"
    STALE = "stale"
    UNKNOWN = "unknown"


STORM = 4
STORM_SECONDS = 60.0

MAX_WAITING = 4096
"""Findings kept until they are taken; further ones are counted only."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One confirmed fault: one check on one page, or, past the limit per burst, on several pages joined.

    Holds no token ids, no KV bytes and no handles. `slots` are inclusive [first, last] ranges, at most `MAX_RANGES`, of
    the `slot_count` slots; slots out of the group appear as the message named them. `position` is the first slot's
    position in `row`, -1 unknown; `row` is "" where no open row holds it. `op` wrote the first slot last, `op_age`
    seconds before `confirmed`; -1 unknown. Times are the caller's clock. The digests and sums (int64, as stored and
    as seen) are the first slot's for `content` and `copy` (stored: its source's), else 0.
    """

    check: Check
    group: str
    slots: list[tuple[int, int]]
    slot_count: int
    pages: list[int]
    position: int
    row: str
    live: bool
    op: int
    op_age: float
    classification: Kind
    first_seen: float
    confirmed: float
    burst: int
    detail: str = ""
    stored_digest: int = 0
    seen_digest: int = 0
    stored_sum: int = 0
    seen_sum: int = 0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a comparison saw, int64 [n] each."""

    stored_digests: I64
    seen_digests: I64
    stored_sums: I64
    seen_sums: I64

    def take(self, index: I64) -> Evidence:
        """The elements at `index`."""
        return Evidence(
            stored_digests=self.stored_digests[index],
            seen_digests=self.seen_digests[index],
            stored_sums=self.stored_sums[index],
            seen_sums=self.seen_sums[index],
        )


class FindingLog:
    """Turns faulty slots into findings: one per check and page, a bounded number at a time, the rest joined.

    Args:
        counters: totals to add to.
        limit: findings per event (one end, or one judged burst); in a storm, which is `STORM` times as many within
            `STORM_SECONDS`, each further check of an event is one finding.
    """

    def __init__(self, counters: Counters, limit: int) -> None:
        self._counters = counters
        self._limit = limit
        self._left = limit
        self._window_began = -np.inf
        self._in_window = 0
        self._waiting: list[Finding] = []

    def start(self, now: float) -> None:
        """A new event begins."""
        if now - self._window_began >= STORM_SECONDS:
            self._window_began, self._in_window = now, 0
        self._left = max(0, min(self._limit, STORM * self._limit - self._in_window))

    def take(self) -> list[Finding]:
        """Findings since the last call."""
        found, self._waiting = self._waiting, []
        return found

    def add(
        self,
        group: Group,
        check: Check,
        slots: I64,
        *,
        rows: I64,
        positions: I64,
        now: float,
        first_seen: float,
        burst: int = -1,
        detail: str = "",
        evidence: Evidence | None = None,
        kind: Kind = Kind.UNKNOWN,
    ) -> None:
        """Slots [n] that are confirmed faulty, with row (or `UNKNOWN_ROW`) and position (or -1) of each."""
        if not slots.size:
            return
        order = np.argsort(slots, kind="stable")
        slots, first = np.unique(slots[order], return_index=True)
        order = order[first]
        self._counters.mismatches[check] += slots.size
        pages, starts = np.unique(pages_of(slots, group.page_size), return_index=True)
        single = max(0, min(pages.size, self._left - 1))
        if pages.size <= self._left:
            single = pages.size
        ends = np.append(starts[1:], slots.size)
        parts = [(int(starts[i]), int(ends[i])) for i in range(single)]
        if single < pages.size:
            parts.append((int(starts[single]), slots.size))
        self._left = max(0, self._left - len(parts))
        self._in_window += len(parts)
        for begin, end in parts:
            item = order[begin]
            self._emit(
                self._finding(
                    group,
                    check,
                    slots[begin:end],
                    row=int(rows[item]),
                    position=int(positions[item]),
                    now=now,
                    first_seen=first_seen,
                    burst=burst,
                    detail=detail,
                    evidence=None if evidence is None else evidence.take(order[begin:end]),
                    kind=kind,
                )
            )

    def _emit(self, finding: Finding) -> None:
        self._counters.findings += 1
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(finding)

    @staticmethod
    def _finding(
        group: Group,
        check: Check,
        slots: I64,
        *,
        row: int,
        position: int,
        now: float,
        first_seen: float,
        burst: int,
        detail: str,
        evidence: Evidence | None,
        kind: Kind,
    ) -> Finding:
        slot = int(slots[0])
        inside = 0 <= slot < group.num_slots
        page = slot // group.page_size
        if row < 0:
            row = group.rows.some_holder(page)
        written = float(group.ledger.ended_at[slot]) if inside else -np.inf
        pages = np.unique(pages_of(slots, group.page_size))[:MAX_RANGES]
        return Finding(
            check=check,
            group=group.name,
            slots=_ranges(slots),
            slot_count=int(slots.size),
            pages=pages.tolist(),
            position=position,
            row=group.rows.names[row] if row != UNKNOWN_ROW else "",
            live=row != UNKNOWN_ROW,
            op=int(group.ledger.last_op[slot]) if inside else -1,
            op_age=now - written if np.isfinite(written) else -1.0,
            classification=kind if evidence is None else _kind(slots, evidence, group.page_size),
            first_seen=first_seen,
            confirmed=now,
            burst=burst,
            detail=detail,
            stored_digest=int(evidence.stored_digests[0]) if evidence else 0,
            seen_digest=int(evidence.seen_digests[0]) if evidence else 0,
            stored_sum=int(evidence.stored_sums[0]) if evidence else 0,
            seen_sum=int(evidence.seen_sums[0]) if evidence else 0,
        )


def _kind(slots: I64, evidence: Evidence, page_size: int) -> Kind:
    """What the bytes of `slots` [n], sorted, have become, as far as digests and sums tell."""
    if not np.count_nonzero(evidence.seen_sums):
        return Kind.ZEROED
    whole = slots.size % page_size == 0 and slots[0] % page_size == 0 and slots[-1] - slots[0] == slots.size - 1
    return Kind.PAGE if whole and page_size > 1 else Kind.ROW


def _ranges(slots: I64) -> list[tuple[int, int]]:
    """Inclusive ranges of sorted unique `slots`, at most `MAX_RANGES`."""
    breaks = np.flatnonzero(slots[1:] != slots[:-1] + 1)
    firsts = np.concatenate([slots[:1], slots[breaks + 1]])[:MAX_RANGES]
    lasts = np.concatenate([slots[breaks], slots[-1:]])[:MAX_RANGES]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

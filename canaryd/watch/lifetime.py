"""`lifetime`: rows that use pages which were freed, or that nobody wrote."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.cause import Cause
from canaryd.watch.columns import pages_of
from canaryd.watch.counters import Check
from canaryd.watch.group import Group
from canaryd.watch.ledger_checks import Claims, LedgerChecks
from canaryd.watch.ops import OpenOp, OpenOps
from canaryd.watch.report import SlotState
from canaryd.watch.rows import GONE_ROW, UNKNOWN_ROW

MAX_WAITING_SLOTS = 1 << 20
"""Prefix slots whose judgement waits for open ops; further ones are not judged."""

_UNUSED = np.zeros(len(SlotState), dtype=np.bool_)
_UNUSED[[SlotState.UNKNOWN, SlotState.VOID, SlotState.FREED]] = True


@dataclass(frozen=True, kw_only=True)
class _Unwritten:
    """Prefix slots without a known write as of message `seq`; all arrays [n]."""

    seq: int
    rows: I64
    revisions: I64
    positions: I64
    slots: I64
    generations: I64


class Lifetime:
    """Judges one group whose engine announces frees.

    Args:
        group: the state that is judged.
        checks: takes the findings.
        private: whether nothing but announced ops fills pages (`tiers: none`); else a prefix that nobody wrote is a
            restore.
    """

    def __init__(self, group: Group, checks: LedgerChecks, *, private: bool) -> None:
        self._group = group
        self._checks = checks
        self._private = private
        self._waiting: deque[_Unwritten] = deque()
        self._waiting_slots = 0

    def forget(self) -> None:
        """Messages were lost: what waits is never judged."""
        self._waiting.clear()
        self._waiting_slots = 0

    def freed(self, pages: I64, cause: Cause, in_flight: Iterable[OpenOp]) -> None:
        """`pages` [p] were freed by `cause`, rows of its end closed and moved, its writes applied."""
        self._held(pages, cause)
        # A page whose earlier content still counted may have been freed before it was handed out to the op.
        ledger = self._group.ledger
        for op in in_flight:
            if op.scope is None or op.lane == cause.lane or self._group.number not in op.scope:
                continue
            torn = np.intersect1d(pages, op.scope[self._group.number])
            slots = ledger.in_pages(torn)
            self._fault(slots[_UNUSED[ledger.state[slots]]], cause, "freed while an op of another lane may write it")

    def _held(self, pages: I64, cause: Cause) -> None:
        """Pages that a row has used since before this op. Windows leave pages behind: only full groups are judged."""
        group, table = self._group, self._group.rows
        if group.ring or group.holes_ok:
            return
        pages = pages[(table.holders[pages] > 0) & (table.acquired[pages] < cause.seq)]
        if group.ledger.has_reserved:
            pages = pages[group.ledger.state[pages * group.page_size] != SlotState.RESERVED]
        if not pages.size:
            return
        pages, rows, indices = table.entries_of(pages)
        used = indices * group.page_size < table.length[rows]
        slots, positions = pages[used] * group.page_size, indices[used] * group.page_size
        self._checks.fault(
            Check.LIFETIME, slots, rows[used], positions, cause=cause, detail="freed while a row holds it"
        )

    def written(self, claims: Claims, cause: Cause) -> None:
        """Writes of rows that closed before, into pages that were freed since. Stream order protects a page from an op
        that was under way on the same lane when it was freed."""
        ledger = self._group.ledger
        gone = claims.rows == GONE_ROW
        if not gone.any():
            return
        slots, positions = claims.slots[gone], claims.positions[gone]
        pages = pages_of(slots, self._group.page_size)
        late = (ledger.freed_seq[pages] < cause.begun_seq) | (ledger.freed_lane[pages] != cause.lane)
        late &= ledger.state[slots] == SlotState.FREED
        none = np.full(int(np.count_nonzero(late)), UNKNOWN_ROW)
        self._checks.fault(
            Check.LIFETIME,
            slots[late],
            none,
            positions[late],
            cause=cause,
            detail="written by a closed row after it was freed",
        )

    def held_unwritten(self, rows: I64, positions: I64, slots: I64, cause: Cause) -> None:
        """Rows [n] came to hold `slots` as a prefix, and `cause` did not write them: a fault if no op that is open now
        names them either."""
        if not self._private or not cause.judged or self._waiting_slots + slots.size > MAX_WAITING_SLOTS:
            return
        self._waiting_slots += slots.size
        self._waiting.append(
            _Unwritten(
                seq=cause.seq,
                rows=rows,
                revisions=self._group.rows.revision[rows],
                positions=positions,
                slots=slots,
                generations=self._group.ledger.generation[slots],
            )
        )

    def judge(self, ops: OpenOps, cause: Cause) -> None:
        """Judges prefixes for which no op of their time is open any more."""
        while self._waiting and not ops.any_since(self._waiting[0].seq):
            prefix = self._waiting.popleft()
            self._waiting_slots -= prefix.slots.size
            same = self._group.ledger.generation[prefix.slots] == prefix.generations
            table = self._group.rows
            still = table.open[prefix.rows] & (table.revision[prefix.rows] == prefix.revisions)
            self._checks.fault(
                Check.LIFETIME,
                prefix.slots[same],
                np.where(still, prefix.rows, UNKNOWN_ROW)[same],
                prefix.positions[same],
                cause=cause,
                detail="used as a prefix, but freed or never written",
            )

    def _fault(self, slots: I64, cause: Cause, detail: str) -> None:
        none = np.full(slots.size, -1)
        self._checks.fault(Check.LIFETIME, slots, none, none, cause=cause, detail=detail)

"""Checks that need no read of the pool: who holds what, judged at an op's end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.cause import Cause
from canaryd.watch.columns import Mask, expand, offsets_of, pages_of
from canaryd.watch.counters import Check
from canaryd.watch.findings import FindingLog
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN
from canaryd.watch.report import SlotState
from canaryd.watch.rows import LEAVING_ROW


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Slots that a row writes or claims with their identity. All [n]; row may be < 0, position and token -1; `chain`
    says where `after` (the chain hash after the token) is known."""

    slots: I64
    rows: I64
    positions: I64
    tokens: I64
    after: I64
    chain: Mask

    def take(self, index: I64 | Mask) -> Claims:
        """The elements at `index`."""
        return Claims(
            slots=self.slots[index],
            rows=self.rows[index],
            positions=self.positions[index],
            tokens=self.tokens[index],
            after=self.after[index],
            chain=self.chain[index],
        )


class LedgerChecks:
    """`owner`, `range` and `input` of one group. Findings go to `log` at once: no read of the pool can refute them.

    Args:
        group: the state that is judged.
        log: takes the findings.
    """

    def __init__(self, group: Group, log: FindingLog) -> None:
        self._group = group
        self._log = log

    def fault(self, check: Check, slots: I64, rows: I64, positions: I64, *, cause: Cause, detail: str) -> None:
        """Reports `slots` [n], with row (< 0: none) and position of each, unless `cause` is not to be judged."""
        if cause.judged:
            now = cause.now
            self._log.add(
                self._group, check, slots, rows=rows, positions=positions, now=now, first_seen=now, detail=detail
            )

    # --- owner --------------------------------------------------------------------------------------------------------

    def owner(self, claims: Claims, cause: Cause, *, writes: bool) -> None:
        """Finds claims of slots that another open row holds, at a position it has written, with provably other content.

        One slot in two rows with the same chain is legal sharing, and so is what cannot be told apart. Slots that the
        ledger knows to hold what is claimed are not looked at further.
        """
        group, table, ledger = self._group, self._group.rows, self._group.ledger
        shared = table.held_by_others(pages_of(claims.slots, group.page_size), claims.rows) & (
            claims.rows != LEAVING_ROW
        )
        if not shared.any():
            return
        claims = claims.take(shared)
        same = claims.chain & ((ledger.flags[claims.slots] & HAS_CHAIN) != 0)
        same &= (ledger.after[claims.slots] == claims.after) & (ledger.position[claims.slots] == claims.positions)
        claims = claims.take(~same)
        if not claims.slots.size:
            return
        claim, holder, place = self._other_holders(claims, cause.op)
        conflict = np.unique(claim[self._differs(claims.take(claim), holder, place)])
        found = claims.take(conflict)
        detail = "written while another row holds it" if writes else "claimed while another row holds it"
        self.fault(Check.OWNER, found.slots, found.rows, found.positions, cause=cause, detail=detail)

    def _other_holders(self, claims: Claims, op: int) -> tuple[I64, I64, I64]:
        """Every other row that holds a claimed slot at a written position: (claim index, row, position) of each.

        A row that is closed may have written in the same op that then handed its page on: rows that this `op` opened
        or moved do not count against it.
        """
        group, table = self._group, self._group.rows
        claimed = pages_of(claims.slots, group.page_size)
        entry_pages, entry_rows, entry_indices = table.entries_of(np.unique(claimed))
        order = np.argsort(entry_pages, kind="stable")
        entry_pages = entry_pages[order]
        first = np.searchsorted(entry_pages, claimed, side="left")
        last = np.searchsorted(entry_pages, claimed, side="right")
        entry, claim = expand(first, last - first)
        entry = order[entry]
        holder = entry_rows[entry]
        place = table.position_in(holder, entry_indices[entry], offsets_of(claims.slots[claim], group.page_size))
        other = (holder != claims.rows[claim]) & (place >= 0)
        other &= (claims.rows[claim] >= 0) | (table.changed_by[holder] != op)
        return claim[other], holder[other], place[other]

    def _differs(self, claims: Claims, holder: I64, place: I64) -> Mask:
        """Whether what the holder has at `place` is provably not what is claimed. [n]"""
        table = self._group.rows
        flat = table.content.offset[holder] + place
        held_token = table.content.data[0][flat]
        differs: Mask = (claims.positions >= 0) & (claims.positions != place)
        differs |= (claims.tokens >= 0) & (held_token >= 0) & (claims.tokens != held_token)
        known = (table.chain_first[holder] <= place + 1) & (place + 1 <= table.chain_last[holder])
        held_after = table.content.data[1][flat + known]
        differs |= claims.chain & known & (held_after != claims.after)
        return differs

    def claimed_prefix(self, row: int, start: int, cause: Cause) -> None:
        """`owner` of what a row opened on or was moved to, from page index `start` on."""
        group, table = self._group, self._group.rows
        window = int(table.window_first(np.array([row]))[0])
        positions = np.arange(window if group.ring else start * group.page_size, int(table.length[row]))
        owner = np.full(positions.size, row)
        slots = table.slots_at(owner, positions)
        there = slots >= 0
        if group.ledger.has_reserved:
            there &= group.ledger.state[np.maximum(slots, 0)] != SlotState.RESERVED
        self.owner(self._held(owner[there], positions[there], slots[there]), cause, writes=False)

    def _held(self, rows: I64, positions: I64, slots: I64) -> Claims:
        """What `rows` [n] say they hold at `positions` [n], in `slots` [n]."""
        table = self._group.rows
        flat = table.content.offset[rows] + positions
        known = (table.chain_first[rows] <= positions + 1) & (positions + 1 <= table.chain_last[rows])
        return Claims(
            slots=slots,
            rows=rows,
            positions=positions,
            tokens=table.content.data[0][flat],
            after=table.content.data[1][flat + known],
            chain=known,
        )

    # --- range --------------------------------------------------------------------------------------------------------

    def pages_of_row(self, row: int, start: int, cause: Cause) -> None:
        """`range` of a row's used page list from index `start` on: holes, reserved slots, repeated pages."""
        group, table = self._group, self._group.rows
        length = int(table.length[row])
        reach = min(length, group.ring) if group.ring else length
        used = min(-(-reach // group.page_size), int(table.page_count[row]))
        index = np.arange(start, used)
        pages = table.pages_of(row)[start:used]
        if not group.holes_ok:
            holes = index[pages < 0] * group.page_size
            self._row_fault(row, np.full(holes.size, -1), holes, cause, "hole in a row")
            there = pages >= 0
            self._reserved(row, index[there], pages[there], reach, cause)
        if not group.ring:
            there = pages >= 0
            self.repeated(np.full(int(there.sum()), row), index[there], pages[there], cause)

    def _reserved(self, row: int, index: I64, pages: I64, reach: int, cause: Cause) -> None:
        ledger = self._group.ledger
        if not ledger.has_reserved or not pages.size:
            return
        slots, positions = ledger.in_pages(pages), ledger.in_pages(index)
        bad = (ledger.state[slots] == SlotState.RESERVED) & (positions < reach)
        self._row_fault(row, slots[bad], positions[bad], cause, "reserved slot in a row")

    def repeated(self, rows: I64, indices: I64, pages: I64, cause: Cause) -> None:
        """`range` of pages that rows came to use at `indices` [n]: one that its row uses at another index too."""
        group, table = self._group, self._group.rows
        several = table.holders[pages] > 1
        if group.ledger.has_reserved:
            several &= group.ledger.state[pages * group.page_size] != SlotState.RESERVED
        if not several.any():
            return
        rows, indices, pages = rows[several], indices[several], pages[several]
        entry_pages, entry_rows, entry_indices = table.entries_of(np.unique(pages))
        used = entry_indices * group.page_size < table.length[entry_rows]
        keys, counts = np.unique(entry_rows[used] * table.num_pages + entry_pages[used], return_counts=True)
        twice = np.isin(rows * table.num_pages + pages, keys[counts > 1])
        slots, positions = pages[twice] * group.page_size, indices[twice] * group.page_size
        self.fault(Check.RANGE, slots, rows[twice], positions, cause=cause, detail="page twice in a row")

    def _row_fault(self, row: int, slots: I64, positions: I64, cause: Cause, detail: str) -> None:
        self.fault(Check.RANGE, slots, np.full(slots.size, row), positions, cause=cause, detail=detail)

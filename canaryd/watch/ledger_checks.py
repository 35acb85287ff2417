"""Checks that need no read of the pool: who holds what, judged at an op's end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from canaryd.watch.burst import I64
from canaryd.watch.columns import Mask
from canaryd.watch.counters import Check
from canaryd.watch.findings import FindingLog
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN
from canaryd.watch.report import SlotState
from canaryd.watch.rows import LEAVING_ROW


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Slots that a row writes or claims with their identity. All [n]; row may be `UNKNOWN_ROW`, position and token -1;
    `chain` says where `after` (the chain hash after the token) is known."""

    slots: I64
    rows: I64
    positions: I64
    tokens: I64
    after: I64
    chain: Mask

    def take(self, index: npt.NDArray[np.int64] | Mask) -> Claims:
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
    """`owner`, `range` and `input` of one group. Findings go to `log` at once: no read of the pool can refute them."""

    def __init__(self, group: Group, log: FindingLog) -> None:
        self._group = group
        self._log = log

    def fault(self, check: Check, slots: I64, rows: I64, positions: I64, now: float, detail: str) -> None:
        """Reports `slots` [n]."""
        self._log.add(self._group, check, slots, rows=rows, positions=positions, now=now, first_seen=now, detail=detail)

    def owner(self, claims: Claims, now: float, *, writes: bool) -> None:
        """Finds claims of slots that another open row holds, at a position it has written, with provably other content.

        One slot in two rows with the same chain is legal sharing, and so is what cannot be told apart. For a
        claim without a write, content that the ledger knows to be the claimed one settles the matter.
        """
        group, rows, ledger = self._group, self._group.rows, self._group.ledger
        shared = rows.held_by_others(claims.slots // group.page_size, claims.rows) & (claims.rows != LEAVING_ROW)
        if not shared.any():
            return
        claims = claims.take(shared)
        same = (ledger.flags[claims.slots] & HAS_CHAIN) != 0
        same &= claims.chain & (ledger.after[claims.slots] == claims.after)
        same &= ledger.position[claims.slots] == claims.positions
        claims = claims.take(~same)
        if not claims.slots.size:
            return
        pages = np.unique(claims.slots // group.page_size)
        entry_pages, entry_rows, entry_indices = rows.entries_of(pages)
        order = np.argsort(entry_pages, kind="stable")
        entry_pages, entry_rows, entry_indices = entry_pages[order], entry_rows[order], entry_indices[order]
        first = np.searchsorted(entry_pages, claims.slots // group.page_size, side="left")
        last = np.searchsorted(entry_pages, claims.slots // group.page_size, side="right")
        claim = np.repeat(np.arange(claims.slots.size), last - first)
        entry = np.arange(claim.size) - np.repeat(np.cumsum(last - first) - (last - first), last - first) + first[claim]
        holder = entry_rows[entry]
        place = rows.position_in(holder, entry_indices[entry], claims.slots[claim] % group.page_size)
        other = (holder != claims.rows[claim]) & (place >= 0)
        claim, holder, place = claim[other], holder[other], place[other]
        conflict = np.unique(claim[self._differs(claims.take(claim), holder, place)])
        found = claims.take(conflict)
        detail = "written while another row holds it" if writes else "claimed while another row holds it"
        self.fault(Check.OWNER, found.slots, found.rows, found.positions, now, detail)

    def _differs(self, claims: Claims, holder: I64, place: I64) -> Mask:
        """Whether what the holder has at `place` is provably not what is claimed. [n]"""
        rows = self._group.rows
        flat = rows.content.offset[holder] + place
        held_token = rows.content.data[0][flat]
        differs = (claims.positions >= 0) & (claims.positions != place)
        differs |= (claims.tokens >= 0) & (held_token >= 0) & (claims.tokens != held_token)
        known = (rows.chain_first[holder] <= place + 1) & (place + 1 <= rows.chain_last[holder])
        held_after = rows.content.data[1][flat + np.where(known, 1, 0)]
        differs |= claims.chain & known & (held_after != claims.after)
        return differs

    def pages_of_row(self, row: int, start: int, now: float) -> None:
        """`range` of a row's used page list from index `start` on: holes, repeated pages, reserved slots."""
        group, rows = self._group, self._group.rows
        length = int(rows.length[row])
        reach = min(length, group.ring) if group.ring else length
        used = min(-(-reach // group.page_size), int(rows.page_count[row]))
        pages = rows.pages_of(row)[:used]
        index = np.arange(used)
        holes = (pages < 0) & (index >= start)
        if holes.any() and not group.holes_ok:
            positions = index[holes] * group.page_size
            self._row_fault(row, np.full(positions.size, -1), positions, now, "hole in a row")
        index, pages = index[pages >= 0], pages[pages >= 0]
        if not group.holes_ok:
            self._reserved(row, index[index >= start], pages[index >= start], reach, now)
        if not group.ring:
            _, first, count = np.unique(pages, return_index=True, return_counts=True)
            repeated = np.ones(pages.size, dtype=np.bool_)
            repeated[first] = False
            repeated &= (index >= start) | (start > 0)
            repeated &= group.ledger.state[pages * group.page_size] != SlotState.RESERVED
            if (count > 1).any() and repeated.any():
                self._row_fault(
                    row,
                    pages[repeated] * group.page_size,
                    index[repeated] * group.page_size,
                    now,
                    "page twice in a row",
                )

    def _reserved(self, row: int, index: I64, pages: I64, reach: int, now: float) -> None:
        group = self._group
        if not group.ledger.has_reserved or not pages.size:
            return
        slots = group.ledger.in_pages(pages)
        positions = group.ledger.in_pages(index)
        bad = (group.ledger.state[slots] == SlotState.RESERVED) & (positions < reach)
        self._row_fault(row, slots[bad], positions[bad], now, "reserved slot in a row")

    def _row_fault(self, row: int, slots: I64, positions: I64, now: float, detail: str) -> None:
        self.fault(Check.RANGE, slots, np.full(slots.size, row), positions, now, detail)

    def claimed_prefix(self, row: int, start: int, now: float) -> None:
        """`owner` of what a row opened on or was moved to, from page index `start` on."""
        group, rows = self._group, self._group.rows
        window = int(rows.window_first(np.array([row]))[0])
        first = window if group.ring else start * group.page_size
        positions = np.arange(first, int(rows.length[row]))
        owner = np.full(positions.size, row)
        slots = rows.slots_at(owner, positions)
        there = slots >= 0
        if group.ledger.has_reserved:
            there &= group.ledger.state[slots] != SlotState.RESERVED
        positions, owner, slots = positions[there], owner[there], slots[there]
        self.owner(claims_of(group, owner, positions, slots), now, writes=False)


def claims_of(group: Group, rows: I64, positions: I64, slots: I64) -> Claims:
    """What `rows` [n] say they hold at `positions` [n], in `slots` [n]."""
    table = group.rows
    flat = table.content.offset[rows] + positions
    known = (table.chain_first[rows] <= positions + 1) & (positions + 1 <= table.chain_last[rows])
    return Claims(
        slots=slots,
        rows=rows,
        positions=positions,
        tokens=table.content.data[0][flat],
        after=table.content.data[1][flat + np.where(known, 1, 0)],
        chain=known,
    )

"""What an op did, applied to one group: rows, remaps, voids, writes, copies, freed pages."""

from __future__ import annotations

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.cause import Cause, MalformedSets, bounded, column
from canaryd.watch.columns import distinct, offsets_of
from canaryd.watch.counters import Check, Counters, Oddity, Rebless, Skip
from canaryd.watch.findings import FindingLog
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN, HAS_POSITION, REVIVED
from canaryd.watch.ledger_checks import LedgerChecks
from canaryd.watch.lifetime import Lifetime
from canaryd.watch.ops import OpenOps
from canaryd.watch.report import SlotState
from canaryd.watch.row_writes import RowWrites
from canaryd.watch.rows import HOLE, UNKNOWN_ROW
from canaryd.wire.messages import Column, Copies, RowOpen

_MAY_BE_OTHERS = np.zeros(len(SlotState), dtype=np.bool_)
_MAY_BE_OTHERS[[SlotState.DOUBT, SlotState.FREED]] = True
"""States in which a slot may have got other content than what the ledger remembers."""


class FinalSets:
    """Applies the lists of an end, in one group.

    Args:
        group: the state that changes.
        counters: totals to add to.
        log: takes the findings of the ledger checks.
        max_rows: rows tracked in this group.
        private: whether nothing but announced ops fills pages.
    """

    def __init__(self, group: Group, counters: Counters, log: FindingLog, *, max_rows: int, private: bool) -> None:
        self._group = group
        self._counters = counters
        self._max_rows = max_rows
        self._claimed: dict[int, int] = {}
        self._prefixes: list[tuple[I64, I64, I64]] = []
        self.checks = LedgerChecks(group, log)
        self.lifetime = Lifetime(group, self.checks, private=private)
        self.writes = RowWrites(group, self.checks, self.lifetime, counters)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def open_row(self, opened: RowOpen, cause: Cause) -> int:
        """Opens a row; its index, or `UNKNOWN_ROW` past the limit. Raises MalformedSets."""
        group, rows = self._group, self._group.rows
        if rows.remove(opened.row):
            self._counters.oddities[Oddity.DUPLICATE_ROW] += 1
        if len(rows) >= self._max_rows:
            self._counters.oddities[Oddity.ROW_LIMIT] += 1
            return UNKNOWN_ROW
        pages, ids = column(opened.pages), column(opened.ids)[: rows.max_positions]
        length = max(0, min(opened.length, rows.max_positions))
        if not rows.has_room(pages.size, max(ids.size, length) + 1):
            self._counters.oddities[Oddity.ROW_LIMIT] += 1
            return UNKNOWN_ROW
        row = rows.add(opened.row, opened.namespace, group.head(opened.namespace), cause.now)
        pages = self._known_pages(row, pages, opened.length, cause)
        rows.replace_pages(row, 0, pages)
        if not group.ring and length > pages.size * group.page_size:
            length = pages.size * group.page_size
            if not group.holes_ok:
                hole = np.array([-1])
                self.checks.fault(
                    Check.RANGE, hole, np.array([row]), np.array([length]), cause=cause, detail="hole in a row"
                )
        rows.length[row] = length
        self._learn_identity(row, ids, length, cause)
        if length:
            self._see_prefix(row, np.arange(pages.size), cause)
        self._claimed[row] = 0
        rows.changed_by[row] = cause.op
        return row

    def close_row(self, name: str) -> bool:
        """Closes a row; False if it is not open in this group."""
        return self._group.rows.remove(name)

    def remap(self, name: str, start: int, pages: Column, cause: Cause) -> None:
        """Replaces the end of a row's page list. Raises MalformedSets."""
        group, rows = self._group, self._group.rows
        row = rows.index.get(name)
        if row is None:
            self._counters.oddities[Oddity.UNKNOWN_ROW] += 1
            return
        # Pages that the row grew by in the same end are named by its writes, which are applied later.
        start = max(0, min(start, rows.max_positions // group.page_size if pages else int(rows.page_count[row])))
        if not rows.has_room(start + len(pages) // 8, 0):
            self._counters.oddities[Oddity.ROW_LIMIT] += 1
            self.close_row(name)
            return
        moved = self._known_pages(row, column(pages), int(rows.length[row]) - start * group.page_size, cause)
        before = rows.pages_of(row)[start:].copy()
        rows.replace_pages(row, start, moved)
        if not group.ring:
            rows.length[row] = min(int(rows.length[row]), int(rows.page_count[row]) * group.page_size)
        rows.revise(row)
        first = 0 if group.ring else start * group.page_size
        rows.link_cursor[row] = min(int(rows.link_cursor[row]), first)
        self._claimed[row] = min(start, self._claimed.get(row, start))
        rows.changed_by[row] = cause.op
        new = np.ones(moved.size, dtype=np.bool_)
        both = min(before.size, moved.size)
        new[:both] = moved[:both] != before[:both]
        self._see_prefix(row, start + np.flatnonzero(new), cause)

    def judge_claims(self, cause: Cause) -> None:
        """Checks the pages of all rows that opened or moved since the last call: after all of an end's rows closed,
        opened and moved, because a page may change hands among them."""
        if cause.judged:
            for row, start in self._claimed.items():
                if self._group.rows.length[row]:
                    self.checks.pages_of_row(row, start, cause)
                    self.checks.claimed_prefix(row, start, cause)
        self._claimed.clear()

    def _known_pages(self, row: int, pages: I64, length: int, cause: Cause) -> I64:
        """`pages` with those out of the group as holes, reported where the row uses them."""
        group = self._group
        outside = ~group.pages_in_range(pages)
        if not outside.any():
            return pages
        used = outside & (np.arange(pages.size) * group.page_size < length)
        if group.holes_ok:
            used &= pages != HOLE
        if used.any():
            index = np.flatnonzero(used)
            named = bounded(pages[index]) * group.page_size
            self.checks.fault(
                Check.RANGE,
                named,
                np.full(index.size, row),
                index * group.page_size,
                cause=cause,
                detail="page out of group",
            )
        return np.where(outside, HOLE, pages)

    def _learn_identity(self, row: int, ids: I64, length: int, cause: Cause) -> None:
        """Ids and chain hashes of a row that opens: from its ids, else from the slot before its first write."""
        group, rows = self._group, self._group.rows
        rows.content.reserve(row, max(ids.size, length) + 1)
        first = int(rows.content.offset[row])
        tokens, hashes = rows.content.data
        rows.ids_length[row] = ids.size
        if ids.size:
            tokens[first : first + ids.size] = ids
            before, after = group.chains.runs(
                rows.head[row : row + 1], ids, np.arange(ids.size), np.array([0, ids.size])
            )
            hashes[first : first + ids.size] = before
            hashes[first + ids.size] = after[-1]
        else:
            hashes[first] = rows.head[row]
        unknown = (ids < 0).nonzero()[0]
        known = int(unknown[0]) if unknown.size else int(ids.size)
        rows.chain_first[row], rows.chain_last[row] = 0, known
        if known < length:
            rows.chain_first[row], rows.chain_last[row] = 1, 0
            self._chain_from_slot(row, length, cause)

    def _chain_from_slot(self, row: int, length: int, cause: Cause) -> None:
        """A row without ids goes on from the slot before: its history is what the ledger says that slot holds, unless
        that is doubted or the row's own end names what it holds now."""
        rows, ledger = self._group.rows, self._group.ledger
        slot = int(rows.slots_at(np.array([row]), np.array([length - 1]))[0])
        if slot < 0 or not ledger.flags[slot] & HAS_CHAIN or ledger.position[slot] != length - 1:
            return
        if _MAY_BE_OTHERS[ledger.state[slot]] or cause.renames(self._group.number, slot, self._group.page_size):
            return
        rows.content.data[1][int(rows.content.offset[row]) + length] = ledger.after[slot]
        rows.chain_first[row] = rows.chain_last[row] = length

    def _see_prefix(self, row: int, index: I64, cause: Cause) -> None:
        """Slots that a row came to hold without writing them, in its pages at `index` [p]: those that were freed are
        doubted."""
        rows, ledger = self._group.rows, self._group.ledger
        if not self._group.ring:
            index = index[index * self._group.page_size < rows.length[row]]
        pages = rows.pages_of(row)[index]
        index, pages = index[pages != HOLE], pages[pages != HOLE]
        slots = ledger.in_pages(pages)
        indices = np.repeat(index, self._group.page_size)
        positions = rows.position_in(np.full(slots.size, row), indices, offsets_of(slots, self._group.page_size))
        written = positions >= 0
        slots, positions = slots[written], positions[written]
        if slots.size:
            ledger.revive(slots, cause.now)
            self._prefixes.append((np.full(slots.size, row), positions, slots))

    def judge_prefixes(self, ops: OpenOps, cause: Cause) -> None:
        """Judges the slots that rows came to hold since the last call and of which no write is known: after all of an
        end's writes and copies, which may have named them."""
        self.lifetime.judge(ops, cause)
        if not self._prefixes:
            return
        rows, positions, slots = (np.concatenate(parts) for parts in zip(*self._prefixes, strict=True))
        self._prefixes.clear()
        slots, first = np.unique(slots, return_index=True)
        ledger, state = self._group.ledger, self._group.ledger.state[slots]
        unknown = (state == SlotState.UNKNOWN) | (state == SlotState.VOID)
        self._counters.skipped[Skip.UNKNOWN_PREFIX] += int(np.count_nonzero(unknown))
        unwritten = unknown | ((state == SlotState.DOUBT) & ((ledger.flags[slots] & REVIVED) != 0))
        if unwritten.any():
            first = first[unwritten]
            self.lifetime.held_unwritten(rows[first], positions[first], slots[unwritten], cause)
            self.lifetime.judge(ops, cause)

    def forget(self) -> None:
        """Rows are forgotten: so are their claims."""
        self._group.rows.clear()
        self._claimed.clear()
        self._prefixes.clear()
        self.lifetime.forget()
        self._group.copies.clear()

    # --- pages --------------------------------------------------------------------------------------------------------

    def void(self, pages: Column, cause: Cause) -> None:
        """Content of the pages is undefined from here on. Raises MalformedSets."""
        self._group.ledger.void(self._group.ledger.in_pages(self._existing(pages, cause)), cause.op)

    def free(self, pages: Column, cause: Cause, ops: OpenOps) -> None:
        """The pages are free, except those that an open row still holds. Raises MalformedSets."""
        freed = self._existing(pages, cause)
        self.lifetime.freed(freed, cause, ops.scoped())
        freed = freed[self._group.rows.holders[freed] == 0]
        self._group.ledger.free(freed, seq=cause.seq, lane=cause.lane)

    def existing(self, pages: Column) -> I64:
        """Unique pages of the group; the others are counted. Raises MalformedSets."""
        named = column(pages)
        inside = self._group.pages_in_range(named)
        self._counters.oddities[Oddity.BAD_PAGE] += int(np.count_nonzero(~inside))
        return distinct(named[inside])

    def _existing(self, pages: Column, cause: Cause) -> I64:
        """Unique pages of the group; the others are reported."""
        named = column(pages)
        inside = self._group.pages_in_range(named)
        if not inside.all():
            outside = bounded(named[~inside]) * self._group.page_size
            self._outside(outside, cause)
        return distinct(named[inside])

    def _outside(self, slots: I64, cause: Cause) -> None:
        none = np.full(slots.size, -1)
        self.checks.fault(Check.RANGE, slots, none, none, cause=cause, detail="slot out of group")

    # --- copies -------------------------------------------------------------------------------------------------------

    def copy(self, copies: Copies, cause: Cause) -> None:
        """Destinations take the identity of their sources, where that is not doubted, and are stamped anew. Raises
        MalformedSets."""
        ledger = self._group.ledger
        sources, destinations = column(copies.sources), column(copies.destinations)
        if sources.size != destinations.size:
            raise MalformedSets("a copy needs as many sources as destinations")
        n = self._group.num_slots
        inside = (destinations >= 0) & (destinations < n)
        if not inside.all():
            self._outside(bounded(destinations[~inside]), cause)
        sources, destinations = sources[inside], destinations[inside]
        known = (sources >= 0) & (sources < n)
        if not known.all():
            self._outside(bounded(sources[~known]), cause)
        if ledger.has_reserved:
            kept = ledger.state[destinations] != SlotState.RESERVED
            sources, destinations, known = sources[kept], destinations[kept], known[kept]
        source = np.where(known, sources, 0)
        known &= ~_MAY_BE_OTHERS[ledger.state[source]]
        judged = known & self._group.copies.copied(source, destinations, cause.op) & cause.done
        ledger.write(
            destinations,
            tokens=np.where(known, ledger.token[source], -1),
            positions=np.where(known, ledger.position[source], -1),
            prev_hash=ledger.prev_hash[source],
            after=ledger.after[source],
            flags=np.where(known, ledger.flags[source] & (HAS_POSITION | HAS_CHAIN), 0).astype(np.uint8),
            op=cause.op,
            begun_at=cause.begun_at,
            ended_at=cause.now,
        )
        left = self._group.copies.add(source[judged], destinations[judged], cause.seq)
        self._counters.oddities[Oddity.COPY_LIMIT] += left

    # --- adoption -----------------------------------------------------------------------------------------------------

    def adopt(self, rows: I64, positions: I64, slots: I64, *, cause: Cause, why: Rebless) -> None:
        """Slots [n] of a snapshot that nothing vouches for are stamped as they are; row and position -1: cached."""
        ledger, table = self._group.ledger, self._group.rows
        slots, first = np.unique(slots, return_index=True)
        rows, positions = rows[first], positions[first]
        known = rows >= 0
        safe_rows, safe_positions = np.where(known, rows, 0), np.where(known, positions, 0)
        if known.any():
            flat = table.content.offset[safe_rows] + safe_positions
            tokens = np.where(known, table.content.data[0][flat], -1)
            chain = known & (table.chain_first[safe_rows] <= positions) & (positions < table.chain_last[safe_rows])
            after_flat = np.where(chain, flat + 1, 0)
            prev_hash = np.where(chain, table.content.data[1][flat], 0)
            after = np.where(chain, table.content.data[1][after_flat], 0)
        else:
            tokens = np.full(slots.size, -1)
            chain = known
            prev_hash = after = np.zeros(slots.size, dtype=np.int64)
        flags = np.where(known, HAS_POSITION, 0) | np.where(chain, HAS_CHAIN, 0)
        ledger.write(
            slots,
            tokens=tokens,
            positions=np.where(known, positions, -1),
            prev_hash=prev_hash,
            after=after,
            flags=flags.astype(np.uint8),
            op=-1,
            begun_at=cause.now,
            ended_at=cause.now,
        )
        self._counters.reblessed[why] += int(slots.size)

"""What an op did, applied to one group: rows, remaps, voids, writes, copies, freed pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.columns import Mask, changes, decode
from canaryd.watch.counters import Check, Counters, Oddity, Rebless, Skip
from canaryd.watch.findings import FindingLog
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN, HAS_POSITION
from canaryd.watch.ledger_checks import Claims, LedgerChecks
from canaryd.watch.report import SlotState
from canaryd.watch.rows import HOLE, LEAVING_ROW, UNKNOWN_ROW, segments
from canaryd.wire.messages import Column, Copies, RowOpen, Writes

MAX_POSITIONS = 1 << 22
"""Longest row that is tracked."""


class MalformedSets(Exception):
    """Columns that contradict each other: what the op did is not known, which is as bad as a lost message."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The op whose sets are applied. `begun_at`, `now`: when its begin and its end were applied. `closed`: the rows
    that its end closes. `judged`: whether ledger checks may raise findings."""

    op: int
    begun_at: float
    now: float
    closed: frozenset[str] = frozenset()
    judged: bool = True


class FinalSets:
    """Applies the lists of an end, in one group.

    Args:
        group: the state that changes.
        counters: totals to add to.
        log: takes the findings of the ledger checks.
        max_rows: rows tracked in this group.
    """

    def __init__(self, group: Group, counters: Counters, log: FindingLog, *, max_rows: int) -> None:
        self._group = group
        self._counters = counters
        self._max_rows = max_rows
        self.checks = LedgerChecks(group, log)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def open_row(self, opened: RowOpen, cause: Cause) -> int:
        """Opens a row; its index, or `UNKNOWN_ROW` past the limit. Raises MalformedSets."""
        group, rows = self._group, self._group.rows
        if rows.remove(opened.row):
            self._counters.oddities[Oddity.DUPLICATE_ROW] += 1
        if len(rows) >= self._max_rows:
            self._counters.oddities[Oddity.ROW_LIMIT] += 1
            return UNKNOWN_ROW
        pages, ids = _column(opened.pages), _column(opened.ids)[:MAX_POSITIONS]
        row = rows.add(opened.row, opened.namespace, group.head(opened.namespace), cause.now)
        pages = self._known_pages(row, pages, opened.length, cause)
        rows.replace_pages(row, 0, pages)
        length = max(0, min(opened.length, MAX_POSITIONS))
        if not group.ring and length > pages.size * group.page_size:
            length = pages.size * group.page_size
            if not group.holes_ok and cause.judged:
                one = np.array([-1])
                self.checks.fault(Check.RANGE, one, np.array([row]), np.array([length]), cause.now, "hole in a row")
        rows.length[row] = length
        self._learn_identity(row, ids, length)
        self._see_prefix(row, cause)
        if cause.judged:
            self.checks.pages_of_row(row, 0, cause.now)
            self.checks.claimed_prefix(row, 0, cause.now)
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
        start = max(0, min(start, int(rows.page_count[row])))
        moved = self._known_pages(row, _column(pages), int(rows.length[row]) - start * group.page_size, cause)
        rows.replace_pages(row, start, moved)
        if not group.ring:
            rows.length[row] = min(int(rows.length[row]), int(rows.page_count[row]) * group.page_size)
        one = np.array([row])
        rows.revise(one)
        first = 0 if group.ring else start * group.page_size
        rows.link_cursor[row] = min(int(rows.link_cursor[row]), first)
        if cause.judged:
            self.checks.pages_of_row(row, start, cause.now)
            self.checks.claimed_prefix(row, start, cause.now)

    def _known_pages(self, row: int, pages: I64, length: int, cause: Cause) -> I64:
        """`pages` with those out of the group as holes, reported where the row uses them."""
        group = self._group
        outside = ~group.pages_in_range(pages)
        if not outside.any():
            return pages
        used = outside & (np.arange(pages.size) * group.page_size < length)
        if group.holes_ok:
            used &= pages != HOLE
        if used.any() and cause.judged:
            index = np.flatnonzero(used)
            named = np.clip(pages[index], -(1 << 40), 1 << 40) * group.page_size
            self.checks.fault(
                Check.RANGE, named, np.full(index.size, row), index * group.page_size, cause.now, "page out of group"
            )
        return np.where(outside, HOLE, pages)

    def _learn_identity(self, row: int, ids: I64, length: int) -> None:
        """Ids and chain hashes of a row that opens: from its ids, else from the slot before its first write."""
        group, rows = self._group, self._group.rows
        rows.content.ensure(np.array([row]), np.array([max(ids.size, length) + 1]))
        first = int(rows.content.offset[row])
        tokens, hashes = rows.content.data
        rows.ids_length[row] = ids.size
        if ids.size:
            tokens[first : first + ids.size] = ids
            before, after = group.chain(rows.head[row : row + 1], ids, np.arange(ids.size), np.array([0, ids.size]))
            hashes[first : first + ids.size] = before
            hashes[first + ids.size] = after[-1]
        else:
            hashes[first] = rows.head[row]
        rows.chain_first[row], rows.chain_last[row] = 0, ids.size
        if ids.size < length:
            rows.chain_first[row], rows.chain_last[row] = 1, 0
            self._chain_from_slot(row, length)

    def _chain_from_slot(self, row: int, length: int) -> None:
        """A row without ids goes on from the slot before: its history is what the ledger says that slot holds."""
        rows, ledger = self._group.rows, self._group.ledger
        slot = int(rows.slots_at(np.array([row]), np.array([length - 1]))[0])
        if slot < 0 or not ledger.flags[slot] & HAS_CHAIN or ledger.position[slot] != length - 1:
            return
        rows.content.data[1][int(rows.content.offset[row]) + length] = ledger.after[slot]
        rows.chain_first[row] = rows.chain_last[row] = length

    def _see_prefix(self, row: int, cause: Cause) -> None:
        """Prefix slots that were freed are doubted; those never written here are counted, and legal."""
        rows, ledger = self._group.rows, self._group.ledger
        one, positions = rows.written_positions(np.array([row]))
        slots = rows.slots_at(one, positions)
        slots = slots[slots >= 0]
        states = ledger.state[slots]
        if cause.judged:
            self._counters.skipped[Skip.UNKNOWN_PREFIX] += int(np.count_nonzero(states == SlotState.UNKNOWN))
        freed = slots[states == SlotState.FREED]
        if freed.size:
            ledger.revive(freed)

    # --- pages --------------------------------------------------------------------------------------------------------

    def void(self, pages: Column, cause: Cause) -> None:
        """Content of the pages is undefined from here on. Raises MalformedSets."""
        self._group.ledger.void(self._group.ledger.in_pages(self._existing(pages, cause)), cause.op)

    def free(self, pages: Column, cause: Cause) -> None:
        """The pages are free, except those that an open row still holds. Raises MalformedSets."""
        freed = self._existing(pages, cause)
        freed = freed[self._group.rows.holders[freed] == 0]
        self._group.ledger.free(self._group.ledger.in_pages(freed))

    def existing(self, pages: Column) -> I64:
        """Unique pages of the group; the others are counted. Raises MalformedSets."""
        named = _column(pages)
        inside = self._group.pages_in_range(named)
        self._counters.oddities[Oddity.BAD_PAGE] += int(np.count_nonzero(~inside))
        return np.unique(named[inside])

    def _existing(self, pages: Column, cause: Cause) -> I64:
        """Unique pages of the group; the others are reported."""
        named = _column(pages)
        inside = self._group.pages_in_range(named)
        if not inside.all():
            outside = np.clip(named[~inside], -(1 << 40), 1 << 40) * self._group.page_size
            self._outside(outside, cause)
        return np.unique(named[inside])

    def _outside(self, slots: I64, cause: Cause) -> None:
        none = np.full(slots.size, -1)
        self.checks.fault(Check.RANGE, slots, none, none, cause.now, "slot out of group")

    # --- copies -------------------------------------------------------------------------------------------------------

    def copy(self, copies: Copies, cause: Cause) -> None:
        """Destinations take the identity of their sources, and are stamped anew. Raises MalformedSets."""
        ledger = self._group.ledger
        sources, destinations = _column(copies.sources), _column(copies.destinations)
        if sources.size != destinations.size:
            raise MalformedSets("a copy needs as many sources as destinations")
        n = self._group.num_slots
        inside = (destinations >= 0) & (destinations < n)
        if not inside.all():
            self._outside(destinations[~inside], cause)
        sources, destinations = sources[inside], destinations[inside]
        known = (sources >= 0) & (sources < n)
        if not known.all():
            self._outside(sources[~known], cause)
        if ledger.has_reserved:
            kept = ledger.state[destinations] != SlotState.RESERVED
            sources, destinations, known = sources[kept], destinations[kept], known[kept]
        source = np.where(known, sources, 0)
        self._group.ledger.write(
            destinations,
            tokens=np.where(known, ledger.token[source], -1),
            positions=np.where(known, ledger.position[source], -1),
            prev_hash=ledger.prev_hash[source],
            after=ledger.after[source],
            flags=np.where(known, ledger.flags[source], 0).astype(np.uint8),
            op=cause.op,
            begun_at=cause.begun_at,
            ended_at=cause.now,
        )

    # --- writes -------------------------------------------------------------------------------------------------------

    def write(self, writes: Writes, cause: Cause) -> None:
        """Tokens were written. Raises MalformedSets."""
        group = self._group
        counts, positions = _column(writes.counts), _column(writes.positions)
        tokens, slots = _column(writes.tokens), _column(writes.slots)
        n = slots.size
        same = positions.size == n and tokens.size == n and counts.size == len(writes.rows)
        if not same or (counts < 0).any() or int(counts.sum()) != n:
            raise MalformedSets("columns of writes differ in length")
        index = group.rows.index
        named = np.fromiter((index.get(row, UNKNOWN_ROW) for row in writes.rows), np.int64, len(writes.rows))
        for at in np.flatnonzero(named == UNKNOWN_ROW).tolist():
            if writes.rows[at] in cause.closed:
                named[at] = LEAVING_ROW
            else:
                self._counters.oddities[Oddity.UNKNOWN_ROW] += 1
        rows = np.repeat(named, counts)
        inside = (slots >= 0) & (slots < group.num_slots)
        if not inside.all():
            outside = np.clip(slots[~inside], -(1 << 40), 1 << 40)
            self.checks.fault(Check.RANGE, outside, rows[~inside], positions[~inside], cause.now, "slot out of group")
            rows, positions, tokens, slots = rows[inside], positions[inside], tokens[inside], slots[inside]
        tracked = (positions >= 0) & (positions < MAX_POSITIONS)
        if not tracked.all():
            rows = np.where(tracked, rows, UNKNOWN_ROW)
        if not slots.size:
            return
        starts = segments(rows, positions)
        for wave in _waves(rows[starts]):
            if wave.size == starts.size:
                self._write_segments(rows, positions, tokens, slots, starts, cause)
                continue
            chosen = np.zeros(starts.size, dtype=np.bool_)
            chosen[wave] = True
            items = np.repeat(chosen, np.diff(np.append(starts, slots.size)))
            lengths = np.diff(np.append(starts, slots.size))[wave]
            self._write_segments(
                rows[items], positions[items], tokens[items], slots[items], np.cumsum(lengths) - lengths, cause
            )

    def _write_segments(self, rows: I64, positions: I64, tokens: I64, slots: I64, starts: I64, cause: Cause) -> None:
        """Stretches of consecutive positions, at most one of each known row. Items [n], stretch starts [k]."""
        group, table = self._group, self._group.rows
        known = rows >= 0
        n = slots.size
        prev_hash, after = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        chain = np.zeros(n, dtype=np.bool_)
        if known.all():
            tokens, prev_hash, after, chain = self._extend(rows, positions, tokens, slots, starts, cause)
        elif known.any():
            seg_known = known[starts]
            lengths = np.diff(np.append(starts, n))[seg_known]
            tokens = tokens.copy()
            tokens[known], prev_hash[known], after[known], chain[known] = self._extend(
                rows[known], positions[known], tokens[known], slots[known], np.cumsum(lengths) - lengths, cause
            )
        keep = self._owned(rows, positions, slots, cause)
        if group.ring:
            newest = ~known | (positions >= table.length[rows] - group.ring)
            keep = newest if keep is None else keep & newest
        claims = Claims(slots=slots, rows=rows, positions=positions, tokens=tokens, after=after, chain=chain)
        if keep is not None:
            claims, prev_hash = claims.take(keep), prev_hash[keep]
        if not claims.slots.size:
            return
        self._place(claims.rows, claims.positions, claims.slots, cause)
        self.checks.owner(claims, cause.now, writes=True)
        flags = np.where(claims.positions >= 0, HAS_POSITION, 0) | np.where(claims.chain, HAS_CHAIN, 0)
        group.ledger.write(
            claims.slots,
            tokens=claims.tokens,
            positions=claims.positions,
            prev_hash=prev_hash,
            after=claims.after,
            flags=flags.astype(np.uint8),
            op=cause.op,
            begun_at=cause.begun_at,
            ended_at=cause.now,
        )

    def _owned(self, rows: I64, positions: I64, slots: I64, cause: Cause) -> Mask | None:
        """Which items are not in reserved slots, None for all. A row that owns a reserved slot is reported."""
        group = self._group
        if not group.ledger.has_reserved:
            return None
        reserved = group.ledger.state[slots] == SlotState.RESERVED
        if not reserved.any():
            return None
        bad = reserved & (rows >= 0)
        if bad.any() and not group.holes_ok:
            self.checks.fault(Check.RANGE, slots[bad], rows[bad], positions[bad], cause.now, "reserved slot in a row")
        return ~reserved

    def _extend(
        self, rows: I64, positions: I64, tokens: I64, slots: I64, starts: I64, cause: Cause
    ) -> tuple[I64, I64, I64, Mask]:
        """Rows grow (or are rewritten) by stretches; returns tokens, prev_hash, after [n], and where these are known."""
        group, table = self._group, self._group.rows
        seg_rows, seg_first = rows[starts], positions[starts]
        lengths = np.diff(np.append(starts, rows.size))
        seg_last = seg_first + lengths - 1
        table.content.ensure(seg_rows, seg_last + 2)
        flat = table.content.offset[rows] + positions
        held, hashes = table.content.data
        before_tokens = held[flat]
        tokens = self._check_input(rows, positions, tokens, slots, starts, before_tokens, cause)

        same = tokens == before_tokens
        valid = (table.chain_first[rows] <= positions) & (positions < table.chain_last[rows])
        recorded = np.logical_and.reduceat(same & valid, starts)
        unchanged = np.logical_and.reduceat(same, starts)
        prev_hash, after = hashes[flat], hashes[flat + 1]
        chain = np.ones(rows.size, dtype=np.bool_)
        if not recorded.all():
            prev_hash, after, chain = self._advance(
                seg_rows, seg_first, lengths, recorded, flat, (tokens, positions, prev_hash, after)
            )
        held[flat] = tokens

        length = table.length[seg_rows]
        rewritten = seg_first < length
        # Other content before the end of a row: what followed belongs to a history that no longer exists.
        cut = rewritten & ~(recorded | unchanged)
        table.length[seg_rows] = np.where(cut, seg_last + 1, np.maximum(length, seg_last + 1))
        if rewritten.any():
            table.revise(seg_rows[rewritten])
            table.link_cursor[seg_rows] = np.minimum(table.link_cursor[seg_rows], seg_first)
        return tokens, prev_hash, after, chain

    def _advance(
        self, seg_rows: I64, seg_first: I64, lengths: I64, recorded: Mask, flat: I64, items: tuple[I64, I64, I64, I64]
    ) -> tuple[I64, I64, Mask]:
        """Chain hashes of the stretches whose hashes are not recorded yet; prev_hash, after, known, all [n]."""
        table = self._group.rows
        hashes = table.content.data[1]
        tokens, positions, prev_hash, after = items
        at_head = seg_first == 0
        goes_on = (table.chain_first[seg_rows] <= seg_first) & (seg_first <= table.chain_last[seg_rows])
        seeds = np.where(at_head, table.head[seg_rows], hashes[table.content.offset[seg_rows] + seg_first])
        seg_known = at_head | goes_on | recorded
        compute = seg_known & ~recorded
        chain = np.repeat(seg_known, lengths)
        if compute.any():
            chosen = np.repeat(compute, lengths)
            counts = lengths[compute]
            offsets = np.concatenate([[0], np.cumsum(counts)])
            new_prev, new_after = self._group.chain(seeds[compute], tokens[chosen], positions[chosen], offsets)
            prev_hash[chosen], after[chosen] = new_prev, new_after
            hashes[flat[chosen]] = new_prev
            hashes[flat[chosen] + 1] = new_after
            changed = seg_rows[compute]
            table.chain_last[changed] = (seg_first + lengths)[compute]
            table.chain_first[changed] = np.where(at_head[compute], 0, table.chain_first[changed])
        lost = seg_rows[~seg_known]
        table.chain_first[lost], table.chain_last[lost] = 1, 0
        prev_hash[~chain] = 0
        after[~chain] = 0
        return prev_hash, after, chain

    def _check_input(
        self, rows: I64, positions: I64, tokens: I64, slots: I64, starts: I64, before: I64, cause: Cause
    ) -> I64:
        """`input`: positions continue their row, tokens are those announced. Returns tokens, unknown ones filled in
        from announced ids."""
        table = self._group.rows
        seg_rows, seg_first = rows[starts], positions[starts]
        if not self._group.holes_ok:
            jumps = seg_first > table.length[seg_rows]
            if self._group.ring:
                # of a chunk longer than the window only the window is kept
                jumps &= np.diff(np.append(starts, rows.size)) < self._group.ring
            if jumps.any():
                at = starts[jumps]
                self.checks.fault(
                    Check.INPUT, slots[at], rows[at], positions[at], cause.now, "position does not continue its row"
                )
        announced = (positions < table.ids_length[rows]) & (before >= 0)
        if not announced.any():
            return tokens
        wrong = announced & (tokens >= 0) & (tokens != before)
        if wrong.any():
            self.checks.fault(
                Check.INPUT, slots[wrong], rows[wrong], positions[wrong], cause.now, "token is not the announced one"
            )
        return np.where(announced & (tokens < 0), before, tokens)

    def _place(self, rows: I64, positions: I64, slots: I64, cause: Cause) -> None:
        """Rows hold the pages that they write."""
        group, table = self._group, self._group.rows
        known = rows >= 0
        if not known.all():
            rows, positions, slots = rows[known], positions[known], slots[known]
        places = table.ring_index(positions)
        off = slots % group.page_size != places % group.page_size
        if off.any():
            self.checks.fault(
                Check.RANGE,
                slots[off],
                rows[off],
                positions[off],
                cause.now,
                "slot is not its position's place in a page",
            )
            rows, positions, slots, places = rows[~off], positions[~off], slots[~off], places[~off]
        if not rows.size:
            return
        indices, pages = places // group.page_size, slots // group.page_size
        first = changes(rows) | changes(indices) | changes(pages)
        rows, indices, pages = rows[first], indices[first], pages[first]
        moved, at = table.set_pages(rows, indices, pages)
        if moved.size:
            table.revise(moved)
            first_place = np.zeros_like(at) if group.ring else at * group.page_size
            np.minimum.at(table.link_cursor, moved, first_place)
        if not group.ring:
            self._repeated(rows, indices, pages, cause)

    def _repeated(self, rows: I64, indices: I64, pages: I64, cause: Cause) -> None:
        """`range`: a page that its row already holds somewhere else."""
        table, page_size = self._group.rows, self._group.page_size
        several = table.holders[pages] > 1
        if not several.any():
            return
        rows, indices, pages = rows[several], indices[several], pages[several]
        entry_pages, entry_rows, entry_indices = table.entries_of(np.unique(pages))
        used = entry_indices * page_size < table.length[entry_rows]
        held = {
            key
            for key, count in zip(
                *np.unique(entry_rows[used] * table.num_pages + entry_pages[used], return_counts=True), strict=True
            )
            if count > 1
        }
        twice = np.isin(rows * table.num_pages + pages, np.fromiter(held, np.int64, len(held)))
        if twice.any():
            self.checks.fault(
                Check.RANGE,
                pages[twice] * page_size,
                rows[twice],
                indices[twice] * page_size,
                cause.now,
                "page twice in a row",
            )

    # --- adoption -----------------------------------------------------------------------------------------------------

    def adopt(self, rows: I64, positions: I64, slots: I64, cause: Cause, why: Rebless) -> None:
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


def _waves(rows: I64) -> list[I64]:
    """Stretches [k] by row, split so that no row comes twice in one wave; in order."""
    _, inverse, counts = np.unique(rows, return_inverse=True, return_counts=True)
    if rows.size == 0 or (counts[inverse][rows >= 0] <= 1).all():
        return [np.arange(rows.size)]
    order = np.argsort(inverse, kind="stable")
    turn = np.empty(rows.size, dtype=np.int64)
    turn[order] = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    turn[rows < 0] = 0
    return [np.flatnonzero(turn == number) for number in range(int(turn.max()) + 1)]


def _column(data: Column) -> I64:
    try:
        return decode(data)
    except ValueError as error:
        raise MalformedSets("a column is not a whole number of elements") from error

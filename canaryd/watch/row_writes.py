"""Tokens that an op wrote: rows grow, chains go on, slots get new content."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canaryd.watch.appends import Appends
from canaryd.watch.burst import I64
from canaryd.watch.cause import MAX_POSITIONS, Cause, MalformedSets, bounded, column
from canaryd.watch.columns import Mask, changes, offsets_of, pages_of
from canaryd.watch.counters import Check, Counters, Oddity
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN, HAS_POSITION
from canaryd.watch.ledger_checks import Claims, LedgerChecks
from canaryd.watch.lifetime import Lifetime
from canaryd.watch.report import SlotState
from canaryd.watch.rows import GONE_ROW, LEAVING_ROW, UNKNOWN_ROW, segments
from canaryd.wire.messages import Writes


@dataclass(frozen=True, kw_only=True)
class Stretches:
    """k stretches of consecutive positions, no open row twice. rows (< 0: not open), positions, tokens, slots [n];
    starts [k] = index of each stretch's first item."""

    rows: I64
    positions: I64
    tokens: I64
    slots: I64
    starts: I64

    @property
    def lengths(self) -> I64:
        """Items of each stretch [k]."""
        out = np.empty_like(self.starts)
        np.subtract(self.starts[1:], self.starts[:-1], out=out[:-1])
        out[-1:] = self.rows.size - self.starts[-1:]
        return out

    def take(self, chosen: Mask) -> Stretches:
        """The stretches where `chosen` [k]."""
        lengths = self.lengths
        items = np.repeat(chosen, lengths)
        kept = lengths[chosen]
        return Stretches(
            rows=self.rows[items],
            positions=self.positions[items],
            tokens=self.tokens[items],
            slots=self.slots[items],
            starts=np.cumsum(kept) - kept,
        )


@dataclass(frozen=True, kw_only=True)
class Identities:
    """What the slots of stretches hold from now on: token, hash before and after it, and where the hashes are known."""

    tokens: I64
    prev_hash: I64
    after: I64
    chain: Mask


class RowWrites:
    """Applies the writes of an end, in one group.

    Args:
        group: the state that changes.
        checks: the ledger checks.
        lifetime: judges writes of rows that are gone.
        counters: totals to add to.
    """

    def __init__(self, group: Group, checks: LedgerChecks, lifetime: Lifetime, counters: Counters) -> None:
        self._group = group
        self._checks = checks
        self._lifetime = lifetime
        self._counters = counters
        self._appends = Appends(group, checks)

    def apply(self, writes: Writes, cause: Cause) -> None:
        """Tokens were written. Raises MalformedSets."""
        counts, positions = column(writes.counts), column(writes.positions)
        tokens, slots = column(writes.tokens), column(writes.slots)
        n = slots.size
        if not n == positions.size == tokens.size == int(counts.sum()) or counts.size != len(writes.rows):
            raise MalformedSets("columns of writes differ in length")
        least = int(counts.min()) if counts.size else 0
        if least < 0:
            raise MalformedSets("a negative count")
        distinct = self._group.rows.distinct(writes.rows) if least and not cause.remapped else None
        if distinct is not None and self._appends.apply(
            distinct, counts, positions=positions, tokens=tokens, slots=slots, cause=cause
        ):
            return
        rows = np.repeat(self._indices(writes.rows, cause), counts)
        for wave in _waves(self._stretches(rows, positions, tokens, slots, cause)):
            self._write(wave, cause)

    def _stretches(self, rows: I64, positions: I64, tokens: I64, slots: I64, cause: Cause) -> Stretches:
        inside = (slots >= 0) & (slots < self._group.num_slots)
        if not inside.all():
            out = ~inside
            self._checks.fault(
                Check.RANGE, bounded(slots[out]), rows[out], positions[out], cause=cause, detail="slot out of group"
            )
            rows, positions, tokens, slots = rows[inside], positions[inside], tokens[inside], slots[inside]
        tracked = (positions >= 0) & (positions < self._group.rows.max_positions)
        if not tracked.all():
            out = ~tracked & (rows >= 0)
            self._checks.fault(
                Check.INPUT, slots[out], rows[out], positions[out], cause=cause, detail="position past any row's end"
            )
            rows = np.where(tracked, rows, UNKNOWN_ROW)
        rows = self._with_room(rows, positions)
        return Stretches(rows=rows, positions=positions, tokens=tokens, slots=slots, starts=segments(rows, positions))

    def _with_room(self, rows: I64, positions: I64) -> I64:
        """`rows` [n], those past the limit of what all rows may hold together as unknown."""
        table = self._group.rows
        known = (rows >= 0).nonzero()[0]
        if not known.size:
            return rows
        order = known[np.argsort(rows[known], kind="stable")]
        starts = changes(rows[order]).nonzero()[0]
        own, ends = rows[order[starts]], np.maximum.reduceat(positions[order], starts) + 1
        if table.content.fits(own, 2 * ends) and table.page_lists.fits(own, 2 * (ends // table.page_size + 1)):
            return rows
        short = own[(table.content.capacity[own] <= ends) | (table.page_lists.capacity[own] * table.page_size < ends)]
        self._counters.oddities[Oddity.ROW_LIMIT] += int(short.size)
        return np.where(np.isin(rows, short), UNKNOWN_ROW, rows)

    def _indices(self, names: list[str], cause: Cause) -> I64:
        index = self._group.rows.index
        named = np.array([index.get(name, UNKNOWN_ROW) for name in names], dtype=np.int64)
        for at in np.flatnonzero(named == UNKNOWN_ROW).tolist():
            if names[at] in cause.closed:
                named[at] = LEAVING_ROW
            else:
                self._counters.oddities[Oddity.UNKNOWN_ROW] += 1
                if self._group.rows.is_gone(names[at]):
                    named[at] = GONE_ROW
        return named

    def _write(self, stretches: Stretches, cause: Cause) -> None:
        group, rows, positions = self._group, stretches.rows, stretches.positions
        known = rows >= 0
        content = self._identify(stretches, known, cause)
        claims = Claims(
            slots=stretches.slots,
            rows=rows,
            positions=positions,
            tokens=content.tokens,
            after=content.after,
            chain=content.chain,
        )
        prev_hash = content.prev_hash
        keep = self._owned(stretches, cause)
        if group.ring:
            # Only the last `ring` positions of a long stretch are still there.
            newest = ~known | (positions >= group.rows.length[rows] - group.ring)
            keep = newest if keep is None else keep & newest
        if keep is not None:
            claims, prev_hash = claims.take(keep), prev_hash[keep]
        if not claims.slots.size:
            return
        self._lifetime.written(claims, cause)
        placed = self._place(claims, cause)
        self._checks.owner(claims if placed is None else claims.take(placed), cause, writes=True)
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
            changes_bytes=cause.done,
        )

    def _identify(self, stretches: Stretches, known: Mask, cause: Cause) -> Identities:
        """Lets open rows grow; what rows that are not open write has no history."""
        if known.all():
            return self._extend(stretches, cause)
        n = known.size
        tokens = stretches.tokens.copy()
        prev_hash, after = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        chain = np.zeros(n, dtype=np.bool_)
        if known.any():
            part = self._extend(stretches.take(known[stretches.starts]), cause)
            tokens[known], prev_hash[known] = part.tokens, part.prev_hash
            after[known], chain[known] = part.after, part.chain
        return Identities(tokens=tokens, prev_hash=prev_hash, after=after, chain=chain)

    def _owned(self, stretches: Stretches, cause: Cause) -> Mask | None:
        """Which items are not in reserved slots, None for all. A row that owns a reserved slot is reported."""
        group, slots, rows = self._group, stretches.slots, stretches.rows
        if not group.ledger.has_reserved:
            return None
        kept: Mask = group.ledger.state[slots] != SlotState.RESERVED
        if kept.all():
            return None
        bad = ~kept & (rows >= 0)
        if bad.any() and not group.holes_ok:
            self._checks.fault(
                Check.RANGE,
                slots[bad],
                rows[bad],
                stretches.positions[bad],
                cause=cause,
                detail="reserved slot in a row",
            )
        return kept

    # --- rows grow ----------------------------------------------------------------------------------------------------

    def _extend(self, stretches: Stretches, cause: Cause) -> Identities:
        """Rows (all open) grow, or are rewritten, by stretches."""
        table, starts = self._group.rows, stretches.starts
        rows, positions = stretches.rows, stretches.positions
        seg_rows, seg_first = rows[starts], positions[starts]
        seg_end = seg_first + stretches.lengths
        table.content.ensure(seg_rows, seg_end + 1)
        flat = table.content.offset[rows] + positions
        held = table.content.data[0]
        before = held[flat]
        tokens = self._check_input(stretches, before, cause)

        same = tokens == before
        valid = (table.chain_first[rows] <= positions) & (positions < table.chain_last[rows])
        recorded = np.logical_and.reduceat(same & valid, starts)
        unchanged = np.logical_and.reduceat(same, starts)
        content = self._advance(stretches, tokens, flat, recorded)
        held[flat] = tokens

        length = table.length[seg_rows]
        rewritten = seg_first < length
        if not rewritten.any():
            table.length[seg_rows] = seg_end
            return content
        # Other content before the end of a row: what followed belongs to a history that no longer exists.
        cut = rewritten & ~unchanged
        table.length[seg_rows] = np.where(cut, seg_end, np.maximum(length, seg_end))
        table.revise(seg_rows[rewritten])
        table.link_cursor[seg_rows] = np.minimum(table.link_cursor[seg_rows], seg_first)
        return content

    def _advance(self, stretches: Stretches, tokens: I64, flat: I64, recorded: Mask) -> Identities:
        """Chain hashes of the stretches: those that are `recorded` [k] from the row, the others computed from the
        hash before them, where it is known."""
        table, starts = self._group.rows, stretches.starts
        hashes = table.content.data[1]
        prev_hash, after = hashes[flat], hashes[flat + 1]
        chain = np.ones(flat.size, dtype=np.bool_)
        if recorded.all():
            return Identities(tokens=tokens, prev_hash=prev_hash, after=after, chain=chain)
        lengths = stretches.lengths
        seg_rows, seg_first = stretches.rows[starts], stretches.positions[starts]
        at_head = seg_first == 0
        goes_on = (table.chain_first[seg_rows] <= seg_first) & (seg_first <= table.chain_last[seg_rows])
        # Past a token that is not known, neither is the history.
        compute = (at_head | goes_on) & ~recorded & np.logical_and.reduceat(tokens >= 0, starts)
        if compute.any():
            seeds = np.where(at_head, table.head[seg_rows], prev_hash[starts])[compute]
            chosen = np.repeat(compute, lengths)
            offsets = np.concatenate([[0], np.cumsum(lengths[compute])])
            new_prev, new_after = self._group.chains.runs(seeds, tokens[chosen], stretches.positions[chosen], offsets)
            prev_hash[chosen], after[chosen] = new_prev, new_after
            hashes[flat[chosen]] = new_prev
            hashes[flat[chosen] + 1] = new_after
            changed = seg_rows[compute]
            table.chain_last[changed] = (seg_first + lengths)[compute]
            table.chain_first[changed] = np.where(at_head[compute], 0, table.chain_first[changed])
        lost = ~(compute | recorded)
        if lost.any():
            table.chain_first[seg_rows[lost]], table.chain_last[seg_rows[lost]] = 1, 0
            chain = np.repeat(~lost, lengths)
            prev_hash[~chain] = 0
            after[~chain] = 0
        return Identities(tokens=tokens, prev_hash=prev_hash, after=after, chain=chain)

    def _check_input(self, stretches: Stretches, before: I64, cause: Cause) -> I64:
        """`input`: positions continue their row, tokens are those announced. Returns the tokens, those written without
        ids taken from the announced ones."""
        table, tokens, starts = self._group.rows, stretches.tokens, stretches.starts
        if not self._group.holes_ok:
            jumps = stretches.positions[starts] > table.length[stretches.rows[starts]]
            if self._group.ring:
                # of a chunk longer than the window only the window is kept
                jumps &= stretches.lengths < self._group.ring
            if jumps.any():
                self._input(stretches, starts[jumps], cause, "position does not continue its row")
        announced = (stretches.positions < table.ids_length[stretches.rows]) & (before >= 0)
        if not announced.any():
            return tokens
        wrong = announced & (tokens >= 0) & (tokens != before)
        if wrong.any():
            self._input(stretches, np.flatnonzero(wrong), cause, "token is not the announced one")
        return np.where(announced & (tokens < 0), before, tokens)

    def _input(self, stretches: Stretches, at: I64, cause: Cause, detail: str) -> None:
        self._checks.fault(
            Check.INPUT,
            stretches.slots[at],
            stretches.rows[at],
            stretches.positions[at],
            cause=cause,
            detail=detail,
        )

    # --- rows hold what they write ------------------------------------------------------------------------------------

    def _place(self, claims: Claims, cause: Cause) -> Mask | None:
        """Rows hold the pages that they write. Returns which claims may be held against other rows, None for all."""
        group, table = self._group, self._group.rows
        rows, slots = claims.rows, claims.slots
        places = table.ring_index(claims.positions)
        fits = rows >= 0
        off = fits & (offsets_of(slots - places, group.page_size) != 0)
        if off.any():
            detail = "slot is not its position's place in a page"
            self._checks.fault(Check.RANGE, slots[off], rows[off], claims.positions[off], cause=cause, detail=detail)
            fits &= ~off
        indices, pages = pages_of(places, group.page_size), pages_of(slots, group.page_size)
        stays = None
        if cause.remapped:
            left = fits & self._left_behind(rows, indices, pages, cause)
            fits &= ~left
            stays = ~left
        if not fits.all():
            rows, indices, pages = rows[fits], indices[fits], pages[fits]
            if not rows.size:
                return stays
        first = changes(rows) | changes(indices) | changes(pages)
        rows, indices, pages = rows[first], indices[first], pages[first]
        table.set_pages(rows, indices, pages)
        if not group.ring:
            self._checks.repeated(rows, indices, pages, cause)
        return stays

    def _left_behind(self, rows: I64, indices: I64, pages: I64, cause: Cause) -> Mask:
        """Writes to a page that the same end moved their row away from (a block that an engine completes, finds twice
        and gives back): the row stays where it was moved to, and the page may already be another's. [n]"""
        table = self._group.rows
        starts = np.full(table.length.size, MAX_POSITIONS, dtype=np.int64)
        for (group, name), start in cause.remapped.items():
            if group == self._group.number and name in table.index:
                starts[table.index[name]] = start
        held = pages_of(table.slots_at(rows, table.page_size * indices), table.page_size)
        left: Mask = (indices >= starts[rows]) & (held >= 0) & (held != pages)
        return left


def _waves(stretches: Stretches) -> list[Stretches]:
    """Split so that no row comes twice in one part; in order."""
    rows = stretches.rows[stretches.starts]
    known = rows[rows >= 0]
    if not known.size or int(np.bincount(known).max()) <= 1:
        return [stretches]
    _, inverse, counts = np.unique(rows, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    turn = np.empty(rows.size, dtype=np.int64)
    turn[order] = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    turn[rows < 0] = 0
    return [stretches.take(turn == number) for number in range(int(turn.max()) + 1)]

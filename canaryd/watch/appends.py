"""Rows that go on where they end: what nearly every step writes, in few operations on whole columns."""

from __future__ import annotations

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.cause import Cause
from canaryd.watch.columns import Mask, offsets_of, pages_of
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN, HAS_POSITION
from canaryd.watch.ledger_checks import Claims, LedgerChecks
from canaryd.watch.report import SlotState

NO_STARTS = np.zeros(0, dtype=np.int64)
NONE_TOLD = np.zeros(0, dtype=np.bool_)


class Appends:
    """Applies writes of one group that need no closer look, with the same outcome as `RowWrites` would have.

    Args:
        group: the state that changes.
        checks: the ledger checks.
    """

    def __init__(self, group: Group, checks: LedgerChecks) -> None:
        self._group = group
        self._checks = checks

    def apply(self, rows: I64, counts: I64, *, positions: I64, tokens: I64, slots: I64, cause: Cause) -> bool:
        """Applies writes if every row goes on at its end, with its chain known up to there or all through, and nothing
        else is to be said of tokens and slots. Else changes nothing that counts and returns False.

        Args:
            rows: open rows [k], each once.
            counts: items of each row, >= 1 [k], summing to n.
            positions, tokens, slots: [n].
            cause: the op.
        """
        group, table = self._group, self._group.rows
        if group.ring or int(tokens.min()) < 0:
            return False
        single = rows.size == slots.size
        starts = NO_STARTS if single else np.cumsum(counts) - counts
        first = positions if single else positions[starts]
        if not self._are_plain(slots, positions):
            return False
        indices, pages = pages_of(positions, group.page_size), pages_of(slots, group.page_size)
        owners, entries = rows, None
        if not single:
            owners = np.repeat(rows, counts)
            heads = offsets_of(positions, group.page_size) == 0
            heads[starts] = True
            entries = heads.nonzero()[0]
            if not _consecutive(positions, starts) or not _consecutive(slots, entries):
                return False
        ends = first + counts
        chain_last = table.chain_last[rows]
        told = self._told(rows, first, ends, chain_last)
        if told is None:
            return False
        flat = table.content.offset[owners] + positions
        if told.size and np.count_nonzero((table.content.data[0][flat] != tokens) & told):
            return False

        prev_hash, after = self._extend(
            rows, starts=starts, ends=ends, chain_last=chain_last, flat=flat, tokens=tokens, positions=positions
        )
        holders = owners
        if entries is not None:
            holders, indices, pages = owners[entries], indices[entries], pages[entries]
        table.set_pages(holders, indices, pages)
        if not table.hold_alone(holders, pages):
            self._checks.repeated(holders, indices, pages, cause)
            chain = np.ones(slots.size, dtype=np.bool_)
            claims = Claims(slots=slots, rows=owners, positions=positions, tokens=tokens, after=after, chain=chain)
            self._checks.owner(claims, cause, writes=True)
        group.ledger.write(
            slots,
            tokens=tokens,
            positions=positions,
            prev_hash=prev_hash,
            after=after,
            flags=HAS_POSITION | HAS_CHAIN,
            op=cause.op,
            begun_at=cause.begun_at,
            ended_at=cause.now,
            changes_bytes=cause.done,
        )
        return True

    def _are_plain(self, slots: I64, positions: I64) -> bool:
        """Whether all `slots` [n] are in the group, not reserved, and at their position's place in a page."""
        ledger, page_size = self._group.ledger, self._group.page_size
        if int(slots.view(np.uint64).max()) >= self._group.num_slots:  # negative ones too
            return False
        if page_size > 1 and np.count_nonzero(offsets_of(slots - positions, page_size)):
            return False
        return not ledger.has_reserved or not np.count_nonzero(ledger.state[slots] == SlotState.RESERVED)

    def _told(self, rows: I64, first: I64, ends: I64, chain_last: I64) -> Mask | None:
        """None if a row [k] does not go on at its end with its chain known, or would become too long. Else makes room,
        and says of each item [n] whether its token must be the one that its row was told of; empty if none must."""
        table = self._group.rows
        good = (table.length[rows] == first) & (table.chain_first[rows] <= first)
        fresh = chain_last == first
        fresh &= table.ids_length[rows] <= first
        told = NONE_TOLD
        if np.count_nonzero(fresh) < rows.size:
            told = chain_last >= ends
            fresh |= told
            told = np.repeat(told, ends - first)
        good &= fresh
        if np.count_nonzero(good) < rows.size:
            return None
        sizes = ends + 1
        if np.count_nonzero(table.content.capacity[rows] < sizes):
            if int(ends.max()) > table.max_positions or not table.content.fits(rows, 2 * sizes):
                return None
            table.content.ensure(rows, sizes)
        return told

    def _extend(
        self, rows: I64, *, starts: I64, ends: I64, chain_last: I64, flat: I64, tokens: I64, positions: I64
    ) -> tuple[I64, I64]:
        """Rows grow; the chain hashes before and after each item [n]."""
        table = self._group.rows
        held, hashes = table.content.data
        table.length[rows] = ends
        if not np.count_nonzero(chain_last < ends):
            return hashes[flat], hashes[flat + 1]
        if rows.size == flat.size:
            prev_hash = hashes[flat]
            after = self._group.chains.step(prev_hash, tokens, positions)
        else:
            offsets = np.append(starts, flat.size)
            prev_hash, after = self._group.chains.runs(hashes[flat[starts]], tokens, positions, offsets)
            hashes[flat] = prev_hash
        held[flat] = tokens
        hashes[flat + 1] = after
        table.chain_last[rows] = np.maximum(chain_last, ends)
        return prev_hash, after


def _consecutive(values: I64, starts: I64) -> bool:
    """Whether each of `values` [n] is one more than the one before it, except at `starts` (the first one among
    them)."""
    follows = values[1:] == values[:-1] + 1
    follows[starts[1:] - 1] = True
    return int(np.count_nonzero(follows)) == int(follows.size)

"""A snapshot: rows are built anew, doubted stamps stay to be compared, the rest is adopted or forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canaryd.watch.burst import I64
from canaryd.watch.cause import Cause
from canaryd.watch.columns import Mask
from canaryd.watch.counters import Counters, Oddity, Rebless, Skip
from canaryd.watch.final_sets import FinalSets
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN, HAS_POSITION
from canaryd.watch.ops import OpenOps
from canaryd.watch.report import SlotState
from canaryd.watch.rows import UNKNOWN_ROW
from canaryd.wire.messages import Snapshot


def adopt_snapshot(
    message: Snapshot,
    groups: Sequence[Group],
    sets: Sequence[FinalSets],
    *,
    counters: Counters,
    cause: Cause,
    why: Rebless,
    ops: OpenOps,
) -> None:
    """Applies a snapshot after everything was forgotten or doubted. Raises MalformedSets."""
    rows: list[list[int]] = [[] for _ in groups]
    cached: list[list[I64]] = [[] for _ in groups]
    for opened in message.rows:
        if not 0 <= opened.group < len(groups):
            counters.oddities[Oddity.UNKNOWN_GROUP] += 1
            continue
        row = sets[opened.group].open_row(opened, cause)
        if row != UNKNOWN_ROW:
            rows[opened.group].append(row)
    for pages in message.cached:
        if not 0 <= pages.group < len(groups):
            counters.oddities[Oddity.UNKNOWN_GROUP] += 1
            continue
        cached[pages.group].append(sets[pages.group].existing(pages.pages))
    for final in sets:
        final.judge_claims(cause)
    for group, final, opened_rows, cached_pages in zip(groups, sets, rows, cached, strict=True):
        _adopt(
            group,
            final,
            np.array(opened_rows, dtype=np.int64),
            cached_pages,
            counters=counters,
            cause=cause,
            why=why,
            ops=ops,
        )


def _adopt(
    group: Group,
    sets: FinalSets,
    rows: I64,
    cached: list[I64],
    *,
    counters: Counters,
    cause: Cause,
    why: Rebless,
    ops: OpenOps,
) -> None:
    ledger = group.ledger
    owners, positions = group.rows.written_positions(rows)
    slots = group.rows.slots_at(owners, positions)
    there = slots >= 0
    owners, positions, slots = owners[there], positions[there], slots[there]
    if cached:
        idle = ledger.in_pages(np.unique(np.concatenate(cached)))
        none = np.full(idle.size, -1)
        owners, positions = np.concatenate([owners, none]), np.concatenate([positions, none])
        slots = np.concatenate([slots, idle])
    named = np.zeros(group.num_slots, dtype=np.bool_)
    named[slots] = True
    forgotten = np.flatnonzero((ledger.state == SlotState.DOUBT) & ~named)
    ledger.forget(forgotten, SlotState.UNKNOWN)
    counters.skipped[Skip.FORGOTTEN] += int(forgotten.size)
    fresh = ledger.state[slots] == SlotState.UNKNOWN
    fresh |= (ledger.state[slots] == SlotState.DOUBT) & _renamed(group, owners, positions, slots)
    sets.adopt(owners[fresh], positions[fresh], slots[fresh], cause=cause, why=why)
    sets.judge_prefixes(ops, cause)


def _renamed(group: Group, rows: I64, positions: I64, slots: I64) -> Mask:
    """Where a row says that a stamped slot holds something else than it was stamped with: a lost write may have named
    it, and equal bytes would not prove that none did."""
    ledger, table = group.ledger, group.rows
    known: Mask = (rows >= 0) & ((ledger.flags[slots] & HAS_POSITION) != 0)
    safe_rows, safe_positions = np.where(known, rows, 0), np.where(known, positions, 0)
    if not known.any():
        return known
    renamed: Mask = known & (ledger.position[slots] != positions)
    flat = table.content.offset[safe_rows] + safe_positions
    tokens = table.content.data[0][flat]
    renamed |= known & (tokens >= 0) & (ledger.token[slots] >= 0) & (tokens != ledger.token[slots])
    chain = known & ((ledger.flags[slots] & HAS_CHAIN) != 0)
    chain &= (table.chain_first[safe_rows] <= positions) & (positions < table.chain_last[safe_rows])
    after = table.content.data[1][np.where(chain, flat + 1, 0)]
    renamed |= chain & (after != ledger.after[slots])
    return renamed

"""Row links: which rows are walked in a burst, and as which items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from canaryd.watch.burst import I64, NO_PREVIOUS, UNCHECKED_PREVIOUS, LinkWork
from canaryd.watch.columns import Mask, changes, expand
from canaryd.watch.group import Group
from canaryd.watch.ledger import HAS_CHAIN, HAS_POSITION
from canaryd.watch.report import SlotState
from canaryd.watch.runs import make_runs, run_starts

_TO_COME = np.zeros(len(SlotState), dtype=np.bool_)
_TO_COME[[SlotState.PENDING, SlotState.PROVISIONAL, SlotState.DOUBT]] = True

NO_GENERATION = -1


@dataclass(frozen=True, kw_only=True)
class LinkItems:
    """Links as they stood when a burst was launched. All int64 [n]; `previous` is a slot, `NO_PREVIOUS` or
    `UNCHECKED_PREVIOUS`."""

    rows: I64
    revisions: I64
    positions: I64
    slots: I64
    generations: I64
    previous: I64
    previous_generations: I64

    def take(self, index: I64 | Mask) -> LinkItems:
        """The elements at `index`."""
        return LinkItems(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})

    @staticmethod
    def joined(parts: list[LinkItems]) -> LinkItems:
        """All parts, one after the other (at least one)."""
        return LinkItems(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in LinkItems.__dataclass_fields__}
        )


class LinkWalk:
    """Walks the rows of one group: what changed since the last tick, and every row again within `max_age` seconds."""

    def __init__(self, group: Group, max_age: float) -> None:
        self._group = group
        # Half the age, so that a walk cut by the limit of a burst can still end in time.
        self._period = max_age / 2
        self._turn = 0

    def select(self, limit: int, now: float) -> LinkItems | None:
        """At most `limit` links to check now; advances the rows' cursors."""
        table = self._group.rows
        due = table.open & (table.link_cursor >= table.length) & (now - table.linked_at > self._period)
        table.link_cursor[due] = 0
        table.linked_at[due] = now
        rows = np.flatnonzero(table.open & (table.link_cursor < table.length))
        if not rows.size:
            return None
        rows = np.roll(rows, -int(np.searchsorted(rows, self._turn)))
        first = np.maximum(table.link_cursor[rows], table.window_first(rows))
        counts = np.minimum(table.length[rows] - first, limit)
        ahead = np.cumsum(counts) - counts
        fits = ahead < limit
        rows, first, counts = rows[fits], first[fits], np.minimum(counts, limit - ahead)[fits]
        self._turn = int(rows[-1]) + 1
        positions, owner = expand(first, counts)
        keep = self._until_first_to_come(rows, first, counts, positions, owner)
        items = self._items(rows[owner[keep]], positions[keep])
        return items if items.slots.size else None

    def _until_first_to_come(self, rows: I64, first: I64, counts: I64, positions: I64, owner: I64) -> Mask:
        """Each row is checked up to its first slot that is still to be settled; its cursor waits there."""
        table, ledger = self._group.rows, self._group.ledger
        slots = table.slots_at(rows[owner], positions)
        waits = (slots >= 0) & _TO_COME[ledger.state[np.maximum(slots, 0)]]
        stop = first + counts
        if waits.any():
            at = np.flatnonzero(waits)
            at = at[changes(owner[at])]
            stop[owner[at]] = positions[at]
        table.link_cursor[rows] = stop
        return positions < stop[owner]

    def _items(self, rows: I64, positions: I64) -> LinkItems:
        table, ledger = self._group.rows, self._group.ledger
        slots = table.slots_at(rows, positions)
        there = slots >= 0
        there &= ledger.state[np.maximum(slots, 0)] == SlotState.SETTLED
        there &= (ledger.flags[np.maximum(slots, 0)] & HAS_POSITION) != 0
        rows, positions, slots = rows[there], positions[there], slots[there]
        uncovered = ~ledger.is_covered(slots)
        rows, positions, slots = rows[uncovered], positions[uncovered], slots[uncovered]
        before = table.slots_at(rows, positions - 1)
        linked = (before >= 0) & (positions > table.window_first(rows))
        safe = np.where(linked, before, 0)
        linked &= (ledger.state[safe] == SlotState.SETTLED) & ((ledger.flags[safe] & HAS_CHAIN) != 0)
        linked &= ~ledger.is_covered(safe)
        chain = (ledger.flags[slots] & HAS_CHAIN) != 0
        previous = np.where(chain & linked, before, UNCHECKED_PREVIOUS)
        previous = np.where(chain & (positions == 0), NO_PREVIOUS, previous)
        return LinkItems(
            rows=rows,
            revisions=table.revision[rows],
            positions=positions,
            slots=slots,
            generations=ledger.generation[slots],
            previous=previous,
            previous_generations=np.where(previous >= 0, ledger.generation[np.maximum(previous, 0)], NO_GENERATION),
        )

    def work(self, items: LinkItems) -> LinkWork:
        """The items as a burst carries them."""
        table, ledger, page_size = self._group.rows, self._group.ledger, self._group.page_size
        breaks = changes(items.rows)
        breaks[1:] |= items.positions[1:] != items.positions[:-1] + 1
        breaks[1:] |= items.previous[1:] != items.slots[:-1]
        starts = run_starts(items.slots, page_size, breaks)
        flat = table.content.offset[items.rows] + items.positions
        tokens = table.content.data[0][flat]
        return LinkWork(
            runs=make_runs(items.slots, items.positions, starts, page_size),
            # A slot that was written without ids cannot be compared with ids.
            tokens=np.where(ledger.token[items.slots] < 0, -1, tokens),
            prev_slots=items.previous[starts],
            heads=table.head[items.rows[starts]],
        )

    def unchanged(self, items: LinkItems) -> tuple[Mask, Mask]:
        """Whether row and contents are what they were at launch: (row unchanged, generations unchanged), [n] each."""
        table, ledger = self._group.rows, self._group.ledger
        row = table.open[items.rows] & (table.revision[items.rows] == items.revisions)
        content = ledger.generation[items.slots] == items.generations
        previous = np.maximum(items.previous, 0)
        content &= (items.previous < 0) | (ledger.generation[previous] == items.previous_generations)
        return row, content

    def walk_again(self, items: LinkItems) -> None:
        """A burst was lost: its links are due again."""
        table = self._group.rows
        same = table.open[items.rows] & (table.revision[items.rows] == items.revisions)
        np.minimum.at(table.link_cursor, items.rows[same], items.positions[same])

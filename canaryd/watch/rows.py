"""The open rows of one group: page lists, ids and chain hashes by position, who holds which page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from canaryd.watch.arena import Arena
from canaryd.watch.burst import I64
from canaryd.watch.cause import MAX_POSITIONS
from canaryd.watch.columns import Mask, changes, expand, offsets_of, pages_of

UNKNOWN_ROW = -1
LEAVING_ROW = -2
"""A row that the same end closes: it is closed before its writes are applied, and they are not held against others."""
GONE_ROW = -3
"""A row that was closed earlier."""
HOLE = -1
"""A row's page that is not there."""

_FIELDS = (
    "length",
    "page_count",
    "chain_first",
    "chain_last",
    "ids_length",
    "namespace",
    "head",
    "revision",
    "link_cursor",
    "changed_by",
)

_LEAST_ROOM = 1 << 22
_SHARED = 8
"""Rows may list this many times the group's slots together, since they share prefixes."""

_MAX_GONE = 16384
"""Names of closed rows that are remembered."""

_ONE_HOLDER = 1 << 40
"""More than the sum of the row indices of all list entries."""


class Rows:
    """Rows by index, an index per name while the row is open. All per-row arrays are int64.

    length: positions that were written. page_count: pages listed. chain_first, chain_last: the chain hashes *before*
    positions first to last are known (none if first > last). ids_length: positions whose ids the engine announced.
    head: chain hash before position 0. revision: changes when pages or written content of the row do, but not when
    the row grows. changed_by: the op whose end opened or remapped it last. link_cursor: links below were checked
    since the row's last change. linked_at: when the last walk over all links began.

    `holders` counts per page the row list entries that name it, `holder_sum` adds up `_ONE_HOLDER` + row index + 1 for
    each, so that it says of one holder which, and of several that there are several. `acquired` is, per page, the `seq`
    at which a row came to list it last; `seq` is set by the caller to the number of the message that it applies.

    Args:
        num_pages, page_size, ring, holes_ok: of the group. Without holes each position of a row has a slot of its own,
            which bounds its length (`max_positions`).
    """

    def __init__(self, num_pages: int, page_size: int, ring: int, *, holes_ok: bool = False) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.ring = ring
        self.index: dict[str, int] = {}
        self._named: list[str] = []
        self._named_rows: I64 | None = None
        self.names: list[str] = []
        self.open: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.length: I64
        self.page_count: I64
        self.chain_first: I64
        self.chain_last: I64
        self.ids_length: I64
        self.namespace: I64
        self.head: I64
        self.revision: I64
        self.link_cursor: I64
        self.changed_by: I64
        for name in _FIELDS:
            setattr(self, name, np.zeros(0, dtype=np.int64))
        self.linked_at = np.zeros(0)
        slots = num_pages * page_size
        self.max_positions = MAX_POSITIONS if ring or holes_ok else min(MAX_POSITIONS, slots)
        self.page_lists = Arena((HOLE,), max(_LEAST_ROOM, _SHARED * num_pages))
        self.content = Arena((-1, 0), max(_LEAST_ROOM, _SHARED * slots))
        self.holders: I64 = np.zeros(num_pages, dtype=np.int64)
        self.holder_sum: I64 = np.zeros(num_pages, dtype=np.int64)
        self.acquired: I64 = np.zeros(num_pages, dtype=np.int64)
        self.seq = 0
        self._gone: dict[str, None] = {}
        self._free: list[int] = []
        self._revisions = 0
        self._grow()

    def __len__(self) -> int:
        return len(self.index)

    def distinct(self, names: list[str]) -> I64 | None:
        """The rows of `names` [k], None if one is not open or comes twice. Steps name the rows of the step before."""
        if self._named_rows is not None and names == self._named:
            return self._named_rows
        try:
            rows = list(map(self.index.__getitem__, names))
        except KeyError:
            return None
        if len(set(rows)) < len(rows):
            return None
        self._named = [self.names[row] for row in rows]
        self._named_rows = np.array(rows, dtype=np.int64)
        return self._named_rows

    # --- opening and closing ------------------------------------------------------------------------------------------

    def add(self, name: str, namespace: int, head: int, now: float) -> int:
        """An empty row; its index."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.index[name] = row
        self._gone.pop(name, None)
        self._named_rows = None
        self.names[row] = name
        self.open[row] = True
        self.length[row] = self.page_count[row] = self.ids_length[row] = self.link_cursor[row] = 0
        self.chain_first[row] = self.chain_last[row] = 0
        self.namespace[row] = namespace
        self.head[row] = head
        self.linked_at[row] = now
        self.content.reserve(row, 1)
        self.content.data[1][self.content.offset[row]] = head
        self.revise(row)
        return row

    def has_room(self, pages: int, positions: int) -> bool:
        """Whether one more list of `pages` pages and one of `positions` positions may be kept."""
        lists, content = self.page_lists, self.content
        return lists.reserved + pages <= lists.limit and content.reserved + positions <= content.limit

    def remove(self, name: str) -> bool:
        """Closes the row; False if it was not open."""
        row = self.index.pop(name, None)
        if row is None:
            return False
        self._named_rows = None
        self._release_pages(row, 0)
        self.page_lists.release(row)
        self.content.release(row)
        self.open[row] = False
        self.names[row] = ""
        self.revise(row)
        self._free.append(row)
        self._gone[name] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]
        return True

    def is_gone(self, name: str) -> bool:
        """Whether a row of this name was closed, as far as is remembered."""
        return name in self._gone

    def clear(self) -> None:
        """Forgets all rows."""
        self._free = list(range(len(self.names)))
        self.index.clear()
        self._named_rows = None
        self.names = [""] * len(self.names)
        self.open[:] = False
        self.page_lists.clear()
        self.content.clear()
        self.holders[:] = 0
        self.holder_sum[:] = 0
        self._gone.clear()
        if self.revision.size:
            self.revise(np.arange(self.revision.size))

    def _grow(self) -> None:
        old = len(self.names)
        size = max(64, 2 * old)
        for name in (*_FIELDS, "linked_at", "open"):
            array = getattr(self, name)
            out = np.zeros(size, dtype=array.dtype)
            out[:old] = array
            setattr(self, name, out)
        self.page_lists.resize(size)
        self.content.resize(size)
        self.names.extend([""] * (size - old))
        self._free.extend(range(size - 1, old - 1, -1))

    def revise(self, rows: I64 | int) -> None:
        """Marks one row, or `rows` [n], as changed."""
        self._revisions += 1
        self.revision[rows] = self._revisions

    # --- pages --------------------------------------------------------------------------------------------------------

    def replace_pages(self, row: int, start: int, pages: I64) -> None:
        """The page list from index `start` on becomes `pages` [p] (each in range or `HOLE`). A list that is shorter has
        holes up to `start`."""
        self._release_pages(row, min(start, int(self.page_count[row])))
        self.page_lists.reserve(row, start + pages.size)
        first = int(self.page_lists.offset[row]) + start
        self.page_lists.data[0][first : first + pages.size] = pages
        self.page_count[row] = start + pages.size
        self._hold(pages, row, 1)

    def set_pages(self, rows: I64, indices: I64, pages: I64) -> None:
        """Entry `indices[i]` of `rows[i]` becomes `pages[i]`; unchanged ones are legal. Of an entry that comes several
        times, which must be in a row, the first change counts. Rows whose entry named another page before are changed,
        and their links checked again from there on."""
        lists = self.page_lists
        lists.ensure(rows, indices + 1)
        flat = lists.offset[rows] + indices
        before = lists.data[0][flat]
        moved = (before != pages).nonzero()[0]
        if not moved.size:
            return
        moved = moved[changes(flat[moved])]
        flat, rows, indices, pages, before = flat[moved], rows[moved], indices[moved], pages[moved], before[moved]
        lists.data[0][flat] = pages
        np.maximum.at(self.page_count, rows, indices + 1)
        self._hold(pages, rows, 1)
        replaced = before != HOLE
        if np.count_nonzero(replaced):
            rows, indices = rows[replaced], indices[replaced]
            self._hold(before[replaced], rows, -1)
            self.revise(rows)
            np.minimum.at(self.link_cursor, rows, np.zeros_like(indices) if self.ring else indices * self.page_size)

    def _release_pages(self, row: int, start: int) -> None:
        first, count = int(self.page_lists.offset[row]), int(self.page_count[row])
        if start >= count:
            return
        view = self.page_lists.data[0][first + start : first + count]
        self._hold(view, row, -1)
        view[:] = HOLE
        self.page_count[row] = start

    def _hold(self, pages: I64, rows: I64 | int, by: int) -> None:
        there = pages != HOLE
        if np.count_nonzero(there) < pages.size:
            pages, rows = pages[there], rows if isinstance(rows, int) else rows[there]
        if by > 0:
            self.acquired[pages] = self.seq
        np.add.at(self.holders, pages, by)
        np.add.at(self.holder_sum, pages, by * (rows + (_ONE_HOLDER + 1)))

    def pages_of(self, row: int) -> I64:
        """A view of the row's page list."""
        first = int(self.page_lists.offset[row])
        return self.page_lists.data[0][first : first + int(self.page_count[row])]

    # --- positions ----------------------------------------------------------------------------------------------------

    def ring_index(self, positions: I64) -> I64:
        """Place of `positions` [n] in their row's pages."""
        return positions % self.ring if self.ring else positions

    def window_first(self, rows: I64) -> I64:
        """First position of each of `rows` [n] that still exists."""
        if not self.ring:
            return np.zeros(rows.size, dtype=np.int64)
        return np.maximum(0, self.length[rows] - self.ring)

    def slots_at(self, rows: I64, positions: I64) -> I64:
        """Slot of each (row, position), `HOLE` where there is none. [n]"""
        places = self.ring_index(positions)
        indices = pages_of(places, self.page_size)
        listed = (positions >= 0) & (indices < self.page_count[rows])
        flat = self.page_lists.offset[rows] + np.where(listed, indices, 0)
        pages = np.where(listed, self.page_lists.data[0][flat], HOLE)
        return np.where(pages == HOLE, HOLE, pages * self.page_size + offsets_of(places, self.page_size))

    def written_positions(self, rows: I64) -> tuple[I64, I64]:
        """All existing positions of `rows` [n]: (row, position) of each."""
        first = self.window_first(rows)
        positions, owner = expand(first, self.length[rows] - first)
        return rows[owner], positions

    def position_in(self, rows: I64, indices: I64, offsets: I64) -> I64:
        """Newest written position of `rows[i]` at `offsets[i]` of its page `indices[i]`, -1 if none. [n]"""
        place = indices * self.page_size + offsets
        length = self.length[rows]
        if not self.ring:
            return np.where(place < length, place, -1)
        newest = place + ((length - 1 - place) // self.ring) * self.ring
        return np.where((place < length) & (place < self.ring), newest, -1)

    # --- holders ------------------------------------------------------------------------------------------------------

    def hold_alone(self, rows: I64, pages: I64) -> bool:
        """Whether one list entry names each of `pages` [n], and that is one of `rows[i]`."""
        return not np.count_nonzero(self.holder_sum[pages] != rows + (_ONE_HOLDER + 1))

    def held_by_others(self, pages: I64, rows: I64) -> Mask:
        """Whether a list entry other than one of `rows[i]` names `pages[i]`. [n]"""
        held = self.holder_sum[pages]
        shared: Mask = (held > 0) & (held != rows + (_ONE_HOLDER + 1))
        return shared

    def entries_of(self, pages: I64) -> tuple[I64, I64, I64]:
        """All list entries that name one of `pages`: (page, row, index) of each. Looks at all page lists."""
        lists = self.page_lists
        wanted = np.zeros(self.num_pages + 1, dtype=np.bool_)
        wanted[pages] = True
        flat = np.flatnonzero(wanted[lists.data[0][: lists.used]])
        rows = lists.row_of[flat]
        return lists.data[0][flat], rows, flat - lists.offset[rows]

    def some_holder(self, page: int) -> int:
        """An open row that holds `page`, or `UNKNOWN_ROW`."""
        if not 0 <= page < self.num_pages or not self.holders[page]:
            return UNKNOWN_ROW
        if self.holders[page] == 1:
            return int(self.holder_sum[page]) - _ONE_HOLDER - 1
        return int(self.entries_of(np.array([page]))[1][0])


def segments(rows: I64, positions: I64) -> I64:
    """Index of each first element of a stretch of one row's consecutive positions."""
    starts = changes(rows)
    starts[1:] |= positions[1:] != positions[:-1] + 1
    return np.flatnonzero(starts)

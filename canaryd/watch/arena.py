"""Growing lists of many rows in a few flat arrays, so that all rows can be read and written at once."""

from __future__ import annotations

import numpy as np

from canaryd.watch.burst import I64

_SMALLEST = 16


class Arena:
    """One list per row; `data[c][offset[row] + i]` is element i of the row's list in column c.

    Args:
        fills: what unused room of each column holds.
        limit: elements that all lists may hold together; asked by `fits`, not enforced.
    """

    def __init__(self, fills: tuple[int, ...], limit: int) -> None:
        self.fills = fills
        self.limit = limit
        self.reserved = 0
        self.data: list[I64] = [np.full(4096, fill, dtype=np.int64) for fill in fills]
        self.row_of: I64 = np.full(4096, -1, dtype=np.int64)
        self.offset: I64 = np.zeros(0, dtype=np.int64)
        self.capacity: I64 = np.zeros(0, dtype=np.int64)
        self.used = 0

    def resize(self, rows: int) -> None:
        """Room for `rows` lists."""
        for name in ("offset", "capacity"):
            out = np.zeros(rows, dtype=np.int64)
            old = getattr(self, name)
            out[: old.size] = old
            setattr(self, name, out)

    def fits(self, rows: I64, sizes: I64) -> bool:
        """Whether there may be room for `sizes[i]` elements in the list of each of `rows` [n]."""
        return self.reserved + int(np.maximum(sizes - self.capacity[rows], 0).sum()) <= self.limit

    def ensure(self, rows: I64, sizes: I64) -> None:
        """Room for `sizes[i]` elements in the list of `rows[i]`; loops only over lists that must move."""
        short = (self.capacity[rows] < sizes).nonzero()[0]
        for row, size in zip(rows[short].tolist(), sizes[short].tolist(), strict=True):
            self.reserve(row, size)

    def reserve(self, row: int, size: int) -> None:
        """Room for `size` elements in the list of one row."""
        capacity = int(self.capacity[row])
        if capacity < size:
            self._move(row, max(_SMALLEST, 2 * capacity, size))

    def release(self, row: int) -> None:
        """Gives the room of one list back."""
        self._clear(int(self.offset[row]), int(self.capacity[row]))
        self.reserved -= int(self.capacity[row])
        self.capacity[row] = 0

    def clear(self) -> None:
        """Gives all room back."""
        self._clear(0, self.used)
        self.capacity[:] = 0
        self.used = self.reserved = 0

    def _clear(self, first: int, count: int) -> None:
        for column, fill in zip(self.data, self.fills, strict=True):
            column[first : first + count] = fill
        self.row_of[first : first + count] = -1

    def _move(self, row: int, capacity: int) -> None:
        if self.used + capacity > self.row_of.size:
            self._make_room(capacity)
        first, old = int(self.offset[row]), int(self.capacity[row])
        for column in self.data:
            column[self.used : self.used + old] = column[first : first + old]
        self._clear(first, old)
        self.offset[row] = self.used
        self.capacity[row] = capacity
        self.reserved += capacity - old
        self.row_of[self.used : self.used + capacity] = row
        self.used += capacity

    def _make_room(self, more: int) -> None:
        """Closes the holes, and doubles the arrays if less than half would be free."""
        rows = np.flatnonzero(self.capacity)
        needed = int(self.capacity[rows].sum()) + more
        size = self.row_of.size
        while size < 2 * needed:
            size *= 2
        data = [np.full(size, fill, dtype=np.int64) for fill in self.fills]
        row_of = np.full(size, -1, dtype=np.int64)
        at = 0
        for row in rows.tolist():
            first, count = int(self.offset[row]), int(self.capacity[row])
            for new, old in zip(data, self.data, strict=True):
                new[at : at + count] = old[first : first + count]
            row_of[at : at + count] = row
            self.offset[row] = at
            at += count
        self.data, self.row_of, self.used = data, row_of, at

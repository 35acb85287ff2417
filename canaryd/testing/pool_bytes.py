"""Which bytes of a pool changed, and whose they are. For host memory and small pools: every look reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from canaryd.watch.columns import slots_of_pages
from canaryd.wire.messages import GroupSpec, RegionSpec

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

Read = Callable[[], Sequence[Bytes]]
"""Gives the bytes of each memory now, 1-D uint8 each, in the order in which regions number them."""


class PoolBytes:
    """Follows the described bytes of a pool.

    `unexplained` holds, per memory, the bytes that changed and that nothing has named yet.

    Args:
        groups: as attached.
        read: reads the memories.
    """

    def __init__(self, groups: Sequence[GroupSpec], read: Read) -> None:
        self._groups = groups
        self._read = read
        self._seen = [memory.copy() for memory in read()]
        self._watched = self._masks()
        for number, group in enumerate(groups):
            self._mark(self._watched, number, np.arange(group.num_pages * group.page_size), value=True)
        for number, group in enumerate(groups):
            for first, last in group.reserved:
                self._mark(self._watched, number, np.arange(first, last), value=False)
        self.unexplained = self._masks()

    def _masks(self) -> list[Mask]:
        return [np.zeros(memory.size, dtype=np.bool_) for memory in self._seen]

    def look(self) -> None:
        """Notes what changed since the last look."""
        for index, memory in enumerate(self._read()):
            self.unexplained[index] |= (memory != self._seen[index]) & self._watched[index]
            np.copyto(self._seen[index], memory)

    def explain(self, group: int, slots: I64) -> None:
        """`slots` [n] of a group were named: their bytes may have changed."""
        size = self._groups[group].num_pages * self._groups[group].page_size
        self._mark(self.unexplained, group, slots[(slots >= 0) & (slots < size)], value=False)

    def explain_pages(self, group: int, pages: I64) -> None:
        """All slots of `pages` [p] of a group were named."""
        self.explain(group, slots_of_pages(pages, self._groups[group].page_size))

    def take_unexplained(self) -> list[str]:
        """Says which slots changed and were not named, one text per group, and forgets them."""
        texts = []
        if any(mask.any() for mask in self.unexplained):
            for number, group in enumerate(self._groups):
                slots = self._changed_slots(number)
                if slots.size:
                    shown = ", ".join(map(str, slots[:8].tolist())) + (", ..." if slots.size > 8 else "")
                    texts.append(f"{slots.size} slots of group {group.name!r} ({shown})")
            for mask in self.unexplained:
                mask[:] = False
        return texts

    def _changed_slots(self, number: int) -> I64:
        group = self._groups[number]
        slots = np.arange(group.num_pages * group.page_size)
        changed = np.zeros(slots.size, dtype=np.bool_)
        for region in group.regions:
            for first in _addresses(group, region, slots):
                within = first[:, None] + np.arange(region.piece_bytes)
                changed |= self.unexplained[region.memory][within].any(axis=1)
        return np.flatnonzero(changed)

    def _mark(self, masks: list[Mask], number: int, slots: I64, *, value: bool) -> None:
        group = self._groups[number]
        for region in group.regions:
            for first in _addresses(group, region, slots):
                masks[region.memory][first[:, None] + np.arange(region.piece_bytes)] = value


def _addresses(group: GroupSpec, region: RegionSpec, slots: I64) -> list[I64]:
    """First byte of each piece of `slots` [n] in a region: one array [n] per piece."""
    pages, offsets = slots // group.page_size, slots % group.page_size
    first = region.offset + pages * region.page_stride + offsets * region.slot_stride
    return [first + piece * region.piece_stride for piece in range(region.pieces)]

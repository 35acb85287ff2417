"""The simulated pool: real bytes in shared memory, and who wrote them last."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from canaryd.client.memory import export_host_tensor
from canaryd.wire.messages import GroupSpec, RegionSpec
from tests.simulation.features import PAGE, WORDS, Features

I64 = npt.NDArray[np.int64]

FULL, SECOND = 0, 1
RING = 20
SLOT_BYTES = WORDS * 8


class Pool:
    """Groups over one flat memory. A *cell* is a slot's place in it; overlaid groups share cells.

    `last_op[cell]` is the op that wrote the cell last or may have; `on_write` and `on_give_up` are called with cells
    that change legally, or may from now on.
    """

    def __init__(self, features: Features, bits: np.random.Generator) -> None:
        self._bits = bits
        pages = features.pages
        self.page_sizes = [PAGE]
        self.rings = [0]
        self.bases = [0]
        cells = pages * PAGE
        self.overlay = features.overlay and features.second == "ring"
        if features.second:
            size = PAGE if features.second == "ring" else 1
            self.page_sizes.append(size)
            self.rings.append(RING if features.second == "ring" else 1)
            self.bases.append(0 if self.overlay else cells)
            cells += 0 if self.overlay else pages * size
        self.num_pages = pages
        self.tensor = torch.empty(cells * SLOT_BYTES, dtype=torch.uint8)
        self.exported = export_host_tensor(self.tensor)
        self.words: I64 = self.tensor.numpy().view(np.int64).reshape(cells, WORDS)
        self.words[:] = self._random(cells)
        self.last_op: I64 = np.zeros(cells, dtype=np.int64)
        self.on_write: Callable[[I64, int], None] = lambda cells, op: None
        self.on_copy: Callable[[I64, I64, int], None] = lambda sources, destinations, op: None
        self.on_give_up: Callable[[I64], None] = lambda cells: None

    def close(self) -> None:
        """Gives the exported descriptor back."""
        self.exported.close()

    def specs(self) -> list[GroupSpec]:
        """The groups as they are attached; page 0 of each is reserved."""
        return [
            GroupSpec(
                name=name,
                num_pages=self.num_pages,
                page_size=size,
                regions=[
                    RegionSpec(
                        name="kv",
                        memory=0,
                        offset=base * SLOT_BYTES,
                        page_stride=size * SLOT_BYTES,
                        slot_stride=SLOT_BYTES,
                        piece_bytes=SLOT_BYTES,
                    )
                ],
                reserved=[(0, size)],
                ring=ring,
            )
            for name, size, ring, base in zip(("full", "second"), self.page_sizes, self.rings, self.bases, strict=False)
        ]

    def view(self, group: int) -> I64:
        """The words of a group's slots, [slots, WORDS]."""
        first = self.bases[group]
        return self.words[first : first + self.num_pages * self.page_sizes[group]]

    def cells(self, group: int, slots: I64) -> I64:
        """Cells of slots."""
        return slots + self.bases[group]

    def slots_of(self, group: int, pages: list[int]) -> I64:
        """All slots of pages."""
        size = self.page_sizes[group]
        return (np.array(pages, dtype=np.int64)[:, None] * size + np.arange(size)).ravel()

    def _random(self, n: int) -> I64:
        return self._bits.integers(-(1 << 62), 1 << 62, size=(n, WORDS))

    def write(self, group: int, slots: I64, op: int) -> None:
        """Fresh random bytes: recomputed KV is never bit-identical."""
        cells = self.cells(group, slots)
        self.words[cells] = self._random(cells.size)
        self._wrote(cells, op)

    def zero(self, group: int, pages: list[int], op: int) -> None:
        """Zeroes whole pages."""
        cells = self.cells(group, self.slots_of(group, pages))
        self.words[cells] = 0
        self._wrote(cells, op)

    def copy(self, group: int, sources: I64, destinations: I64, op: int) -> None:
        """Copies slots."""
        cells, origin = self.cells(group, destinations), self.cells(group, sources)
        self.words[cells] = self.words[origin]
        self._wrote(cells, op)
        self.on_copy(origin, cells, op)

    def _wrote(self, cells: I64, op: int) -> None:
        self.last_op[cells] = op
        self.on_write(cells, op)

    def give_up(self, group: int, pages: list[int], op: int) -> None:
        """Pages whose content `op` gives up: nothing in them is promised from now on, changed or not."""
        cells = self.cells(group, self.slots_of(group, pages))
        self.last_op[cells] = op
        self.on_give_up(cells)

"""Regions of one layout as parts: tables that one launch of a kernel reads, made once on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from canary_kernels.layout import GroupLayout, Region
from canary_kernels.nonfinite import NONFINITE_RULES
from canary_kernels.reference.digest import keys

_TILE = 1024
"""Words of one tile: eight per thread at four warps; half of it where each takes two loads, whose addresses fill
registers."""
_MOST_LANES = 256
_HOST_PROGRAMS = 3
"""Programs under the interpreter: more than one, so that tests see the split of the work."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Regions that share strides, pieces, length, alignment and dtype: they differ in address and key only.

    Args:
        numbers: int64 [regions] on the device: which regions of the layout, in attach order.
        table: int64 [regions, 2] on the device: byte address of slot 0, and the region's key.
        unit: alignment of every word in bytes: 16 (two words per load), 8, or 4 (two loads per word).
        page_stride, slot_stride, piece_stride, piece_length, length: in loads, of 4 bytes if `unit` is 4, else of 8.
        dtype: the key of `NONFINITE_RULES` by which a scan reads these regions, or None.
        lanes: consecutive words of a slot that make one row of a tile.
    """

    numbers: torch.Tensor
    table: torch.Tensor
    unit: int
    page_stride: int
    slot_stride: int
    piece_stride: int
    piece_length: int
    length: int
    dtype: str | None
    lanes: int

    @property
    def regions(self) -> int:
        """How many regions this part has."""
        return self.numbers.numel()

    @property
    def rows(self) -> int:
        """Rows of one tile."""
        return _TILE // self.lanes if self.unit != 4 else _TILE // self.lanes // 2

    @property
    def rows_per_slot(self) -> int:
        """Rows of a tile that hold one slot."""
        words = self.length if self.unit != 4 else (self.length + 1) // 2
        return int(triton.cdiv(words, self.lanes))

    def programs(self, capacity: int, wave: int) -> int:
        """Size of a grid of one program per tile and share of the regions, enough for any number of slots up to
        `capacity`: the regions are shared out until there are `wave` programs, and rounding adds at most one per tile.
        """
        tiles: int = triton.cdiv(capacity * self.rows_per_slot, self.rows)
        return min(tiles * self.regions, tiles + wave)

    @property
    def in_pieces(self) -> bool:
        """Whether a slot is more than one run of bytes."""
        return self.piece_length < self.length


def programs_on(device: torch.device, per_multiprocessor: int) -> int:
    """Size of a grid that fills the device once, whatever the work."""
    if device.type != "cuda":
        return _HOST_PROGRAMS
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


def _strides(layout: GroupLayout, region: Region) -> tuple[int, int, int]:
    """Page, slot and piece stride in bytes, 0 where there is only one."""
    return (
        region.page_stride if layout.num_pages > 1 else 0,
        region.slot_stride if layout.page_size > 1 else 0,
        region.piece_stride if region.pieces > 1 else 0,
    )


def _address(region: Region) -> int:
    return region.memory.data_ptr() + region.offset


def _unit(layout: GroupLayout, region: Region) -> int:
    """The largest of 16, 8 and 4 that divides every address of the region and the length of its pieces."""
    places = (*_strides(layout, region), region.piece_bytes, _address(region))
    return next(unit for unit in (16, 8, 4) if not any(place % unit for place in places))


def lanes_for(words: int) -> int:
    """How many words one row of a tile has: the widest row that leaves at most an eighth of the lanes without work.

    144 words (MLA) become 9 rows of 16, 82 words 11 rows of 8, 17 words (132 bytes) 9 rows of 2.
    """
    lanes = min(_MOST_LANES, triton.next_power_of_2(words))
    while triton.cdiv(words, lanes) * lanes * 7 > words * 8:
        lanes //= 2
    return lanes


def parts_of(layout: GroupLayout) -> list[Part]:
    """All regions of the layout by geometry; the device holds the tables when this returns."""
    _, region_keys = keys(layout, layout.device)
    key_of: list[int] = region_keys.tolist()
    chosen: dict[tuple[object, ...], list[int]] = {}
    for number, region in enumerate(layout.regions):
        dtype = region.dtype if region.dtype in NONFINITE_RULES else None
        place = (_unit(layout, region), _strides(layout, region), region.piece_bytes, region.pieces, dtype)
        chosen.setdefault(place, []).append(number)
    return [_part(layout, numbers, key_of) for numbers in chosen.values()]


def _part(layout: GroupLayout, numbers: list[int], key_of: list[int]) -> Part:
    region = layout.regions[numbers[0]]
    unit = _unit(layout, region)
    load = min(unit, 8)
    page_stride, slot_stride, piece_stride = (stride // load for stride in _strides(layout, region))
    rows = [[_address(layout.regions[number]), key_of[number]] for number in numbers]
    return Part(
        numbers=torch.tensor(numbers, dtype=torch.int64, device=layout.device),
        table=torch.tensor(rows, dtype=torch.int64, device=layout.device),
        unit=unit,
        page_stride=page_stride,
        slot_stride=slot_stride,
        piece_stride=piece_stride,
        piece_length=region.piece_bytes // load,
        length=region.slot_bytes // load,
        dtype=region.dtype if region.dtype in NONFINITE_RULES else None,
        lanes=lanes_for(region.words),
    )

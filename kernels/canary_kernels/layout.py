"""Where the bytes of a slot are: strided regions over memory that the caller has mapped.

This is the one place for slot addressing. A region's byte address of piece i of slot s is
`memory + offset + (s // page_size)*page_stride + (s % page_size)*slot_stride + i*piece_stride`, int64 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Region:
    """One strided piece of a group.

    Args:
        memory: uint8 tensor, 1-D, contiguous: the mapped memory that holds the region. Not owned.
        offset, page_stride, slot_stride, piece_stride, piece_bytes: bytes, multiples of 4.
        pieces: how many pieces (HND heads) make up one slot.
        dtype: torch's name of the elements, without `torch.`, for the NaN/Inf scan; a region of None or of a dtype that
            `canary_kernels.nonfinite.NONFINITE_RULES` does not list is not scanned.
    """

    memory: torch.Tensor
    offset: int
    page_stride: int
    slot_stride: int
    piece_bytes: int
    pieces: int = 1
    piece_stride: int = 0
    dtype: str | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in this region."""
        return self.pieces * self.piece_bytes

    @property
    def words(self) -> int:
        """8-byte words of one slot, the last one possibly half."""
        return (self.slot_bytes + 7) // 8


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """All regions of one group, in attach order. Raises ValueError if a region leaves its memory, is not 4-byte
    aligned or is on another device than the first; every kernel relies on that proof."""

    regions: tuple[Region, ...]
    num_pages: int
    page_size: int

    def __post_init__(self) -> None:
        if self.num_pages < 1 or self.page_size < 1 or not self.regions:
            raise ValueError("a group needs at least one page, one slot per page and one region")
        for number, region in enumerate(self.regions):
            self._prove(number, region)

    def _prove(self, number: int, region: Region) -> None:
        memory = region.memory
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError(f"region {number}: memory must be a contiguous 1-D uint8 tensor")
        if memory.device != self.device:
            raise ValueError(f"region {number}: memory must be on region 0's device {self.device}, got {memory.device}")
        sizes = {
            "offset": region.offset,
            "page_stride": region.page_stride,
            "slot_stride": region.slot_stride,
            "piece_stride": region.piece_stride,
            "piece_bytes": region.piece_bytes,
            "base address": memory.data_ptr(),
        }
        for name, value in sizes.items():
            if value < 0 or value % 4:
                raise ValueError(f"region {number}: {name} must be a non-negative multiple of 4, got {value}")
        if region.pieces < 1 or region.piece_bytes < 4:
            raise ValueError(f"region {number}: a slot needs at least one piece of 4 bytes")
        end = (
            region.offset
            + (self.num_pages - 1) * region.page_stride
            + (self.page_size - 1) * region.slot_stride
            + (region.pieces - 1) * region.piece_stride
            + region.piece_bytes
        )
        if end > memory.numel():
            raise ValueError(f"region {number}: ends at byte {end} of memory that has {memory.numel()}")

    @property
    def num_slots(self) -> int:
        """Slots of the group."""
        return self.num_pages * self.page_size

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in all regions."""
        return sum(region.slot_bytes for region in self.regions)

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.regions[0].memory.device

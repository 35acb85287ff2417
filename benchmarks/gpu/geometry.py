"""Pools as engines lay them out, over the arena; and what a read of them must move."""

from __future__ import annotations

from collections.abc import Callable

import torch
from canary_kernels import GroupLayout, Region

from benchmarks.gpu.workload import Place

_ALIGNMENT = 512
"""Of each layer's tensor, as torch's allocator gives it."""
SECTOR = 32

Layout = Callable[[Place, int], GroupLayout]
"""(place, slots) -> a layout with at least as many slots."""


def rows(*sizes: int, page_size: int = 16) -> Layout:
    """One region per size, each a tensor [pages, page_size, bytes] of its own: NHD, MLA, indexer, scales."""

    def build(place: Place, slots: int) -> GroupLayout:
        pages = -(-slots // page_size)
        regions = []
        start = 0
        for size in sizes:
            length = pages * page_size * size
            regions.append(
                Region(
                    memory=_slice(place, start, length),
                    offset=0,
                    page_stride=page_size * size,
                    slot_stride=size,
                    piece_bytes=size,
                )
            )
            start += -(-length // _ALIGNMENT) * _ALIGNMENT
        return GroupLayout(regions=tuple(regions), num_pages=pages, page_size=page_size)

    return build


def heads_first(*, regions: int, heads: int, head_bytes: int, page_size: int = 16) -> Layout:
    """HND: tensors [pages, heads, page_size, bytes]; a slot is `heads` pieces."""

    def build(place: Place, slots: int) -> GroupLayout:
        pages = -(-slots // page_size)
        piece_stride = page_size * head_bytes
        length = pages * heads * piece_stride
        return GroupLayout(
            regions=tuple(
                Region(
                    memory=_slice(place, number * length, length),
                    offset=0,
                    page_stride=heads * piece_stride,
                    slot_stride=head_bytes,
                    piece_bytes=head_bytes,
                    pieces=heads,
                    piece_stride=piece_stride,
                )
                for number in range(regions)
            ),
            num_pages=pages,
            page_size=page_size,
        )

    return build


def packed(*, regions: int, row_bytes: int, page_size: int = 16) -> Layout:
    """One buffer for all layers: [pages, regions, page_size, bytes]."""

    def build(place: Place, slots: int) -> GroupLayout:
        pages = -(-slots // page_size)
        step = page_size * row_bytes
        memory = _slice(place, 0, pages * regions * step)
        return GroupLayout(
            regions=tuple(
                Region(
                    memory=memory,
                    offset=number * step,
                    page_stride=regions * step,
                    slot_stride=row_bytes,
                    piece_bytes=row_bytes,
                )
                for number in range(regions)
            ),
            num_pages=pages,
            page_size=page_size,
        )

    return build


def _slice(place: Place, start: int, length: int) -> torch.Tensor:
    if start + length > place.arena.numel():
        raise ValueError(f"the arena has {place.arena.numel()} bytes, and the layout wants {start + length}")
    return place.arena[start : start + length]


def sector_bytes(layout: GroupLayout, slots: torch.Tensor) -> int:
    """Bytes of the 32-byte sectors that the pieces of `slots` touch, piece by piece: what a random read must move."""
    page = torch.div(slots, layout.page_size, rounding_mode="floor")
    offset = slots - page * layout.page_size
    counted: dict[tuple[int, ...], int] = {}
    total = 0
    for region in layout.regions:
        start = (region.memory.data_ptr() + region.offset) % SECTOR
        kind = (start, region.page_stride, region.slot_stride, region.piece_stride, region.pieces, region.piece_bytes)
        if kind not in counted:
            sectors = 0
            for piece in range(region.pieces):
                first = start + page * region.page_stride + offset * region.slot_stride + piece * region.piece_stride
                ends = first % SECTOR + region.piece_bytes + SECTOR - 1
                sectors += int(torch.div(ends, SECTOR, rounding_mode="floor").sum())
            counted[kind] = sectors * SECTOR
        total += counted[kind]
    return total

"""Layouts with everything that addressing must cope with, over random memory, and items on them."""

from __future__ import annotations

import torch
from canary_kernels import GroupLayout, Region

EVEN = ("nhd", "heads", "packed", "shared")
"""Multiples of 16 bytes per slot, which the sglang scheme needs."""
NAMES = (*EVEN, "wide", "indexer", "shifted", "straddling", "mixed", "tiny", "shared_odd")


def layout(name: str, generator: torch.Generator, device: str = "cpu") -> GroupLayout:
    """One of `NAMES`; regions are surrounded by random bytes that belong to nobody."""
    build = {
        "nhd": lambda: _group(5, 16, [_rows(64), _rows(64), _rows(64)]),
        "heads": lambda: _group(4, 3, [_heads(3, 32), _heads(3, 32)]),
        "packed": lambda: _group(4, 16, [_packed(48, 0), _packed(48, 1)]),
        "wide": lambda: _group(3, 1, [_rows(2320), _rows(2320)]),
        "indexer": lambda: _group(7, 1, [_rows(132)]),
        "shifted": lambda: _group(3, 16, [_rows(40, shift=4), _rows(40, shift=12)]),
        "straddling": lambda: _group(5, 3, [_heads(3, 12), _heads(5, 4)]),
        "mixed": lambda: _group(3, 3, [_rows(64), _heads(2, 20), _rows(4), _rows(2320), _rows(16, gap=16)]),
        "shared": lambda: _shared(4, 3, [(48, 1), (48, 0), (64, 2), (48, 5), (48, 4)]),
        "shared_odd": lambda: _shared(3, 5, [(20, 2), (132, 0), (20, 0), (20, 5), (132, 4)], shift=4),
        "tiny": lambda: _group(1, 1, [_rows(4)]),
    }[name]
    return build()(generator, device)


def _rows(size, *, shift=0, gap=0):
    step = size + gap
    return lambda pages, page: ({"page_stride": page * step, "slot_stride": step, "piece_bytes": size}, shift)


def _heads(pieces, size):
    return lambda pages, page: (
        {
            "page_stride": pieces * page * size,
            "slot_stride": size,
            "piece_bytes": size,
            "pieces": pieces,
            "piece_stride": page * size,
        },
        0,
    )


def _packed(size, half):
    return lambda pages, page: (
        {"page_stride": 2 * page * size, "slot_stride": size, "piece_bytes": size},
        half * page * size,
    )


def _group(num_pages, page_size, makers):
    def build(generator: torch.Generator, device: str) -> GroupLayout:
        regions = []
        for maker in makers:
            fields, shift = maker(num_pages, page_size)
            room = 64 + num_pages * fields["page_stride"] + fields.get("pieces", 1) * fields.get("piece_stride", 0)
            memory = torch.randint(0, 256, (room + shift + 64,), dtype=torch.uint8, generator=generator).to(device)
            regions.append(Region(memory=memory, offset=32 + shift, **fields))
        return GroupLayout(regions=tuple(regions), num_pages=num_pages, page_size=page_size)

    return build


def _shared(num_pages, page_size, halves, *, shift=0):
    """Regions of (bytes, number of a half page) in one memory, as of one buffer for all layers, in any order."""

    def build(generator: torch.Generator, device: str) -> GroupLayout:
        room = max(size for size, _ in halves) * page_size
        page, layer = 2 * room, 2 * room * num_pages
        memory = torch.randint(0, 256, (3 * layer + 64,), dtype=torch.uint8, generator=generator).to(device)
        regions = tuple(
            Region(
                memory=memory,
                offset=32 + shift + half // 2 * layer + half % 2 * room,
                page_stride=page,
                slot_stride=size,
                piece_bytes=size,
            )
            for size, half in halves
        )
        return GroupLayout(regions=regions, num_pages=num_pages, page_size=page_size)

    return build


def poisoned(*shape: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> torch.Tensor:
    """A tensor of 0xA5 bytes."""
    size = torch.empty(shape, dtype=dtype)
    size.view(-1).view(torch.uint8).fill_(0xA5)
    return size.to(device)


def some_slots(group: GroupLayout, count: int, generator: torch.Generator) -> torch.Tensor:
    """Random slots of the group, with slots that are out of range between them."""
    slots = torch.randint(0, group.num_slots, (count,), generator=generator)
    wild = torch.tensor([-1, group.num_slots, (1 << 63) - 1, -(1 << 63)])
    return torch.cat([slots[: count // 2], wild, slots[count // 2 :]])

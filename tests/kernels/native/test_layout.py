"""A layout exists only if every byte of every slot is inside its memory; all kernels rely on that."""

from __future__ import annotations

import pytest
import torch
from canary_kernels import GroupLayout, Region

# 3 pages of 4 slots of 2 pieces of 8 bytes: ends at 4 + 2*128 + 3*8 + 64 + 8 = 356
GOOD = {"offset": 4, "page_stride": 128, "slot_stride": 8, "pieces": 2, "piece_stride": 64, "piece_bytes": 8}


def build(*, num_pages=3, page_size=4, memory=None, regions=None, **changes):
    memory = torch.zeros(356, dtype=torch.uint8) if memory is None else memory
    region = Region(memory=memory, **(GOOD | changes))
    return GroupLayout(regions=(region,) if regions is None else regions, num_pages=num_pages, page_size=page_size)


def test_a_layout_may_end_where_its_memory_ends():
    group = build()
    assert (group.num_slots, group.slot_bytes) == (12, 16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"memory": torch.zeros(355, dtype=torch.uint8)}, "region 0: ends at byte 356 of memory that has 355"),
        ({"offset": 8}, "ends at byte 360 of memory that has 356"),
        ({"num_pages": 4}, "ends at byte 484"),
        ({"page_size": 5}, "ends at byte 364"),
        ({"pieces": 3}, "ends at byte 420"),
        ({"page_stride": 1 << 62}, r"ends at byte 92\d+ of memory"),
        ({"slot_stride": 6}, "slot_stride must be a non-negative multiple of 4, got 6"),
        ({"offset": -4}, "offset must be a non-negative multiple of 4, got -4"),
        ({"piece_bytes": 0}, "at least one piece of 4 bytes"),
        ({"pieces": 0}, "at least one piece of 4 bytes"),
        ({"memory": torch.zeros(400, dtype=torch.uint8)[2:]}, "base address must be a non-negative multiple of 4"),
        ({"memory": torch.zeros(400, dtype=torch.int8)}, "contiguous 1-D uint8 tensor"),
        ({"memory": torch.zeros(800, dtype=torch.uint8)[::2]}, "contiguous 1-D uint8 tensor"),
        ({"memory": torch.zeros((20, 20), dtype=torch.uint8)}, "contiguous 1-D uint8 tensor"),
        ({"num_pages": 0}, "at least one page"),
        ({"page_size": 0}, "at least one page"),
        ({"regions": ()}, "one region"),
    ],
)
def test_a_layout_that_is_not_proven_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        build(**changes)


def test_regions_on_two_devices_are_refused():
    """A kernel would take the address of the one for an address on the other."""
    regions = tuple(
        Region(memory=torch.zeros(356, dtype=torch.uint8, device=device), **GOOD) for device in ("cpu", "meta")
    )
    with pytest.raises(ValueError, match="region 1: memory must be on region 0's device cpu, got meta"):
        build(regions=regions)

"""Expanding runs to items in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels.device.search import find_owner
from canary_kernels.device.sizes import bounded_size, fixed_grid, size_on_device

if TYPE_CHECKING:
    from canary_kernels.items import ItemRuns, Items

_BLOCK = 256

BAD_SLOT = tl.constexpr((1 << 63) - 1)
UNCHECKED_PREVIOUS = tl.constexpr(-2)


@triton.jit
def slot_of(pages, page_offsets, first_offsets, pages_len, run, nth, inside, num_pages, page_size):
    """Slot of the nth item of a run, BAD_SLOT where its place in the list or its page is out of range."""
    offset = tl.load(first_offsets + run, mask=inside, other=0) + nth
    page_index = tl.where(offset >= 0, offset, 0) // page_size
    place = tl.load(page_offsets + run, mask=inside, other=0) + page_index
    end = tl.load(page_offsets + run + 1, mask=inside, other=0)
    listed = inside & (offset >= 0) & (place < end) & (place >= 0) & (place < pages_len)
    page = tl.load(pages + place, mask=listed, other=-1)
    good = listed & (page >= 0) & (page < num_pages)
    return tl.where(good, page * page_size + offset - page_index * page_size, BAD_SLOT)


_ITEMS_COLUMNS = ["pages", "page_offsets", "first_offsets", "item_offsets", "first_positions", "first_prev_slots"]


@triton.jit(
    do_not_specialize=[
        *_ITEMS_COLUMNS,
        "run_count",
        "item_count",
        "run_capacity",
        "item_capacity",
        "pages_len",
        "num_pages",
        "page_size",
    ]
)
def plan_items_kernel(
    pages,
    page_offsets,
    first_offsets,
    item_offsets,
    first_positions,
    first_prev_slots,
    run_count,
    item_count,
    out_slots,
    out_positions,
    out_prev_slots,
    out_run_numbers,
    run_capacity: tl.int64,
    item_capacity: tl.int64,
    pages_len: tl.int64,
    num_pages: tl.int64,
    page_size: tl.int64,
    BLOCK: tl.constexpr,
):
    """Slot, position, previous slot and run number of each item; a tile of BLOCK items per step.

    Reads the runs' columns (int64 [k], [k+1]) and one page number per item; writes four int64 per item. Items without
    any run are not written.

    Floor: 32 bytes written per item, 48 read per run, 8 per page.
    """
    k = bounded_size(run_count, run_capacity)
    n = tl.where(k > 0, bounded_size(item_count, item_capacity), 0)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        item = first + tl.arange(0, BLOCK)
        mask = item < n
        run = find_owner(item_offsets, 1, k, item, mask)
        nth = item - tl.load(item_offsets + run, mask=mask, other=0)
        inside = mask & (item < tl.load(item_offsets + run + 1, mask=mask, other=0))
        slot = slot_of(pages, page_offsets, first_offsets, pages_len, run, nth, inside, num_pages, page_size)
        follows = inside & (nth > 0)
        before = slot_of(pages, page_offsets, first_offsets, pages_len, run, nth - 1, follows, num_pages, page_size)
        before = tl.where(before == BAD_SLOT, UNCHECKED_PREVIOUS, before)
        given = tl.load(first_prev_slots + run, mask=mask, other=0)
        position = tl.load(first_positions + run, mask=mask, other=0) + nth
        tl.store(out_slots + item, slot, mask=mask)
        tl.store(out_positions + item, position, mask=mask)
        tl.store(out_prev_slots + item, tl.where(nth == 0, given, before), mask=mask)
        tl.store(out_run_numbers + item, run, mask=mask)
        first += tl.num_programs(0).to(tl.int64) * BLOCK


def enqueue_items(
    runs: ItemRuns,
    out: Items,
    *,
    run_count: torch.Tensor,
    item_count: torch.Tensor,
    num_pages: int,
    page_size: int,
) -> None:
    """Launches `plan_items_kernel` for the first `run_count` of `runs` and the first `item_count` items of `out`.

    Both counts are int64 [1] on the device and clamped to the tensors' sizes. Allocates nothing and never waits.
    """
    capacity = out.slots.numel()
    plan_items_kernel[fixed_grid(capacity, _BLOCK)](
        runs.pages,
        runs.page_offsets,
        runs.first_offsets,
        runs.item_offsets,
        runs.first_positions,
        runs.first_prev_slots,
        run_count,
        item_count,
        out.slots,
        out.positions,
        out.prev_slots,
        out.run_numbers,
        runs.first_offsets.numel(),
        capacity,
        runs.pages.numel(),
        num_pages,
        page_size,
        BLOCK=_BLOCK,
    )


def plan_items(runs: ItemRuns, out: Items, *, num_pages: int, page_size: int) -> None:
    """Expands all runs to all items; see `canary_kernels.items.launch_plan_items`."""
    device = out.slots.device
    enqueue_items(
        runs,
        out,
        run_count=size_on_device(runs.first_offsets.numel(), device),
        item_count=size_on_device(out.slots.numel(), device),
        num_pages=num_pages,
        page_size=page_size,
    )

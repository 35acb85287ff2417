"""Expanding runs to items in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from canary_kernels.records import OUT_OF_RANGE_SLOT

if TYPE_CHECKING:
    from canary_kernels.items import ItemRuns, Items

UNCHECKED_PREVIOUS = -2


def plan_items(runs: ItemRuns, out: Items, *, num_pages: int, page_size: int) -> None:
    """Fills `out` as `canary_kernels.items.launch_plan_items` says."""
    n = out.slots.numel()
    count = runs.first_offsets.numel()
    item = torch.arange(n, dtype=torch.int64, device=out.slots.device)
    run = torch.searchsorted(runs.item_offsets[1:], item, right=True)
    inside = run < count
    run = run.clamp_(max=count - 1)
    nth = item - runs.item_offsets[run]
    offset = runs.first_offsets[run] + nth
    index = runs.page_offsets[run] + torch.div(offset, page_size, rounding_mode="floor")
    inside &= (offset >= 0) & (index < runs.page_offsets[run + 1]) & (index < runs.pages.numel())
    if runs.pages.numel():
        page = runs.pages[torch.where(inside, index, 0)]
        inside &= (page >= 0) & (page < num_pages)
        slots = torch.where(inside, page * page_size + offset % page_size, OUT_OF_RANGE_SLOT)
    else:
        slots = torch.full_like(item, OUT_OF_RANGE_SLOT)
    previous = torch.roll(slots, 1)
    previous = torch.where(previous == OUT_OF_RANGE_SLOT, UNCHECKED_PREVIOUS, previous)
    out.slots.copy_(slots)
    out.positions.copy_(runs.first_positions[run] + nth)
    out.prev_slots.copy_(torch.where(nth == 0, runs.first_prev_slots[run], previous))
    out.run_numbers.copy_(run)

"""Comparing records with what was read, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels.device.findings import reserve
from canary_kernels.device.sizes import bounded_size, fixed_grid, size_on_device

if TYPE_CHECKING:
    from canary_kernels.findings import Findings

_BLOCK = 256

FIELDS = tl.constexpr(8)
COLUMNS = tl.constexpr(5)
STAMPED = tl.constexpr(1)


@triton.jit(
    do_not_specialize=[
        "slots",
        "digests",
        "sums",
        "first_item",
        "item_count",
        "item_capacity",
        "num_slots",
        "capacity",
        "item_base",
    ]
)
def compare_kernel(
    records,
    slots,
    digests,
    sums,
    rows,
    count,
    first_item,
    item_count,
    item_capacity: tl.int64,
    num_slots: tl.int64,
    capacity: tl.int64,
    item_base: tl.int64,
    HAS_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row for each item whose recorded digest or sum is not the one that was read; a tile of BLOCK items per step.

    Reads slot, digest and sum of each item and digest, sum and flags of its record; writes the rows of mismatches,
    with one atomic per tile that has any.

    Floor: 24 bytes per item and the 64 of its record.
    """
    begin = item_capacity * 0
    if HAS_FIRST:
        begin = bounded_size(first_item, item_capacity)
    end = begin + bounded_size(item_count, item_capacity - begin)
    at = begin + tl.program_id(0).to(tl.int64) * BLOCK
    while at < end:
        item = at + tl.arange(0, BLOCK)
        mask = item < end
        slot = tl.load(slots + item, mask=mask, other=-1)
        digest = tl.load(digests + item, mask=mask, other=0)
        total = tl.load(sums + item, mask=mask, other=0)
        inside = mask & (slot >= 0) & (slot < num_slots)
        record = records + tl.where(inside, slot, 0) * FIELDS
        stored_digest = tl.load(record + 3, mask=inside, other=0)
        stored_sum = tl.load(record + 4, mask=inside, other=0)
        flags = tl.load(record + 6, mask=inside, other=0)
        known = inside & ((flags & STAMPED) != 0)
        bad = mask & ((known == 0) | (stored_digest != digest) | (stored_sum != total))
        if tl.sum(bad.to(tl.int32), axis=0) > 0:
            place = reserve(count, bad)
            stored = bad & (place >= 0) & (place < capacity)
            row = rows + place * COLUMNS
            tl.store(row, item - begin + item_base, mask=stored)
            tl.store(row + 1, stored_digest, mask=stored)
            tl.store(row + 2, digest, mask=stored)
            tl.store(row + 3, stored_sum, mask=stored)
            tl.store(row + 4, total, mask=stored)
        at += tl.num_programs(0).to(tl.int64) * BLOCK


def enqueue_compare(
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    out: Findings,
    *,
    count: torch.Tensor,
    first: torch.Tensor | None = None,
    item_base: int = 0,
) -> None:
    """Launches `compare_kernel` for `count` items from `first` on (None: from 0); item numbers in `out` start there.

    `count` and `first` are int64 [1] on the device and clamped to the vectors' sizes; `out.count` is not reset.
    Allocates nothing and never waits.
    """
    item_capacity = slots.numel()
    compare_kernel[fixed_grid(item_capacity, _BLOCK)](
        records,
        slots,
        digests,
        sums,
        out.rows,
        out.count,
        count if first is None else first,
        count,
        item_capacity,
        records.shape[0],
        out.rows.shape[0],
        item_base,
        HAS_FIRST=first is not None,
        BLOCK=_BLOCK,
    )


def compare(
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    out: Findings,
    *,
    item_base: int,
) -> None:
    """Compares all items; see `canary_kernels.compare.launch_compare`."""
    count = size_on_device(slots.numel(), slots.device)
    enqueue_compare(records, slots, digests, sums, out, count=count, item_base=item_base)

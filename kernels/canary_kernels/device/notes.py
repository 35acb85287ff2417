"""Notes of slots that are about to be stamped, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels import constants
from canary_kernels.device.findings import reserve
from canary_kernels.device.sizes import bounded_size, fixed_grid, size_on_device

if TYPE_CHECKING:
    from canary_kernels.findings import Findings

_BLOCK = 256

FIELDS = tl.constexpr(8)
STAMPED = tl.constexpr(1)
UNCHANGED = tl.constexpr(constants.NOTE_UNCHANGED)
NONFINITE = tl.constexpr(constants.NOTE_NONFINITE)


@triton.jit(
    do_not_specialize=[
        "slots",
        "digests",
        "sums",
        "nonfinite",
        "item_count",
        "item_capacity",
        "num_slots",
        "capacity",
    ]
)
def notes_kernel(
    records,
    slots,
    digests,
    sums,
    nonfinite,
    rows,
    count,
    item_count,
    item_capacity: tl.int64,
    num_slots: tl.int64,
    capacity: tl.int64,
    BLOCK: tl.constexpr,
):
    """A row for each item of which there is something to say; a tile of BLOCK items per step.

    Reads 25 bytes of each item and digest, sum and flags of its record; writes 16 bytes per row, with one atomic per
    tile that has any.

    Floor: 25 bytes per item and the 64 of its record.
    """
    n = bounded_size(item_count, item_capacity)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    while at < n:
        item = at + tl.arange(0, BLOCK)
        mask = item < n
        slot = tl.load(slots + item, mask=mask, other=-1)
        inside = mask & (slot >= 0) & (slot < num_slots)
        record = records + tl.where(inside, slot, 0) * FIELDS
        same = tl.load(record + 3, mask=inside, other=0) == tl.load(digests + item, mask=inside, other=0)
        same &= tl.load(record + 4, mask=inside, other=0) == tl.load(sums + item, mask=inside, other=0)
        flags = tl.load(record + 6, mask=inside, other=0)
        unchanged = inside & same & ((flags & STAMPED) != 0)
        strange = inside & (tl.load(nonfinite + item, mask=inside, other=0) != 0)
        noted = unchanged | strange
        if tl.sum(noted.to(tl.int32), axis=0) > 0:
            place = reserve(count, noted)
            stored = noted & (place >= 0) & (place < capacity)
            row = rows + place * 2
            tl.store(row, item, mask=stored)
            tl.store(row + 1, unchanged.to(tl.int64) * UNCHANGED + strange.to(tl.int64) * NONFINITE, mask=stored)
        at += tl.num_programs(0).to(tl.int64) * BLOCK


def enqueue_notes(
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    nonfinite: torch.Tensor,
    out: Findings,
    *,
    count: torch.Tensor,
) -> None:
    """Launches `notes_kernel` for the first `count` items: int64 [1] on the device, clamped to the vectors' size.

    `out.count` is not reset. Allocates nothing and never waits.
    """
    item_capacity = slots.numel()
    notes_kernel[fixed_grid(item_capacity, _BLOCK)](
        records,
        slots,
        digests,
        sums,
        nonfinite,
        out.rows,
        out.count,
        count,
        item_capacity,
        records.shape[0],
        out.rows.shape[0],
        BLOCK=_BLOCK,
    )


def notes(
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    nonfinite: torch.Tensor,
    out: Findings,
) -> None:
    """Notes of all items; see `canary_kernels.notes.launch_notes`."""
    count = size_on_device(slots.numel(), slots.device)
    enqueue_notes(records, slots, digests, sums, nonfinite, out, count=count)

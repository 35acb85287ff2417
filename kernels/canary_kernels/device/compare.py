"""Comparing records with what was read, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels.device.findings import reserve

if TYPE_CHECKING:
    from canary_kernels.findings import Findings

_BLOCK = 256

FIELDS = tl.constexpr(8)
COLUMNS = tl.constexpr(5)
STAMPED = tl.constexpr(1)


@triton.jit(do_not_specialize=["n", "num_slots", "capacity", "item_base"])
def compare_kernel(
    records,
    slots,
    digests,
    sums,
    rows,
    count,
    n: tl.int64,
    num_slots: tl.int64,
    capacity: tl.int64,
    item_base: tl.int64,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK items."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = item < n
    slot = tl.load(slots + item, mask=mask, other=-1)
    inside = mask & (slot >= 0) & (slot < num_slots)
    record = records + tl.where(inside, slot, 0) * FIELDS
    stored_digest = tl.load(record + 3, mask=inside, other=0)
    stored_sum = tl.load(record + 4, mask=inside, other=0)
    flags = tl.load(record + 6, mask=inside, other=0)
    digest = tl.load(digests + item, mask=mask, other=0)
    total = tl.load(sums + item, mask=mask, other=0)
    known = inside & ((flags & STAMPED) != 0)
    bad = mask & ((known == 0) | (stored_digest != digest) | (stored_sum != total))
    place = reserve(count, bad)
    stored = bad & (place >= 0) & (place < capacity)
    row = rows + place * COLUMNS
    tl.store(row, item + item_base, mask=stored)
    tl.store(row + 1, stored_digest, mask=stored)
    tl.store(row + 2, digest, mask=stored)
    tl.store(row + 3, stored_sum, mask=stored)
    tl.store(row + 4, total, mask=stored)


def compare(
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    out: Findings,
    *,
    item_base: int,
) -> None:
    """Launches `compare_kernel`."""
    n = slots.numel()
    compare_kernel[(triton.cdiv(n, _BLOCK),)](
        records,
        slots,
        digests,
        sums,
        out.rows,
        out.count,
        n,
        records.shape[0],
        out.rows.shape[0],
        item_base,
        BLOCK=_BLOCK,
    )

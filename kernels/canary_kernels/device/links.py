"""Comparing records with rows (token, position, chain link), in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels.device.findings import reserve
from canary_kernels.device.mixing import mix, mix3
from canary_kernels.scheme import Scheme

if TYPE_CHECKING:
    from canary_kernels.findings import Findings
    from canary_kernels.items import Items

_BLOCK = 256

FACTOR = tl.constexpr(0xD1342543DE82EF95 - (1 << 64))
FIELDS = tl.constexpr(8)
COLUMNS = tl.constexpr(2)
STAMPED = tl.constexpr(1)
CHAIN_UNKNOWN = tl.constexpr(2)
NO_PREVIOUS = tl.constexpr(-1)
FAIL_CHAIN = tl.constexpr(1)
FAIL_POSITION = tl.constexpr(2)
FAIL_TOKEN = tl.constexpr(32)
FAIL_RANGE = tl.constexpr(64)


@triton.jit(do_not_specialize=["n", "num_heads", "num_slots", "capacity", "item_base", "key"])
def links_kernel(
    records,
    slots,
    positions,
    prev_slots,
    run_numbers,
    tokens,
    heads,
    rows,
    count,
    n: tl.int64,
    num_heads: tl.int64,
    num_slots: tl.int64,
    capacity: tl.int64,
    item_base: tl.int64,
    key: tl.int64,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK items."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = item < n
    slot = tl.load(slots + item, mask=mask, other=-1)
    inside = mask & (slot >= 0) & (slot < num_slots)
    record = records + tl.where(inside, slot, 0) * FIELDS
    token = tl.load(record, mask=inside, other=0)
    position = tl.load(record + 1, mask=inside, other=0)
    prev_hash = tl.load(record + 2, mask=inside, other=0)
    flags = tl.load(record + 6, mask=inside, other=0)
    stamped = inside & ((flags & STAMPED) != 0)
    known = (flags & CHAIN_UNKNOWN) == 0

    prev_slot = tl.load(prev_slots + item, mask=mask, other=-2)
    wild_previous = mask & (prev_slot >= num_slots)
    has_previous = mask & (prev_slot >= 0) & (prev_slot < num_slots)
    previous = records + tl.where(has_previous, prev_slot, 0) * FIELDS
    previous_token = tl.load(previous, mask=has_previous, other=0)
    previous_position = tl.load(previous + 1, mask=has_previous, other=0)
    previous_hash = tl.load(previous + 2, mask=has_previous, other=0)
    previous_flags = tl.load(previous + 6, mask=has_previous, other=0)
    usable = has_previous & ((previous_flags & (STAMPED | CHAIN_UNKNOWN)) == STAMPED)
    if NATIVE:
        linked = previous_hash * FACTOR + mix(mix(previous_token ^ key) ^ previous_position)
    else:
        linked = mix3(previous_hash, previous_token, previous_position)
    at_head = mask & (prev_slot == NO_PREVIOUS)
    run = tl.load(run_numbers + item, mask=at_head, other=0)
    wild_run = at_head & ((run < 0) | (run >= num_heads))
    at_head = at_head & (wild_run == 0)
    head = tl.load(heads + run, mask=at_head, other=0)
    expected = tl.where(at_head, head, linked)

    expected_token = tl.load(tokens + item, mask=mask, other=-1)
    expected_position = tl.load(positions + item, mask=mask, other=0)
    bad_chain = stamped & known & (at_head | usable) & (prev_hash != expected)
    bad_position = stamped & (position != expected_position)
    bad_token = stamped & known & (expected_token != -1) & (token != expected_token)
    bad_range = mask & ((inside == 0) | wild_previous | wild_run)
    bits = (
        tl.where(bad_chain, FAIL_CHAIN, 0)
        + tl.where(bad_position, FAIL_POSITION, 0)
        + tl.where(bad_token, FAIL_TOKEN, 0)
        + tl.where(bad_range, FAIL_RANGE, 0)
    ).to(tl.int64)
    bad = bits != 0
    place = reserve(count, bad)
    stored = bad & (place >= 0) & (place < capacity)
    tl.store(rows + place * COLUMNS, item + item_base, mask=stored)
    tl.store(rows + place * COLUMNS + 1, bits, mask=stored)


def links(
    records: torch.Tensor,
    items: Items,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    out: Findings,
    *,
    scheme: Scheme,
    key: int,
    item_base: int,
) -> None:
    """Launches `links_kernel`."""
    n = items.slots.numel()
    links_kernel[(triton.cdiv(n, _BLOCK),)](
        records,
        items.slots,
        items.positions,
        items.prev_slots,
        items.run_numbers,
        tokens,
        heads,
        out.rows,
        out.count,
        n,
        heads.numel(),
        records.shape[0],
        out.rows.shape[0],
        item_base,
        key,
        NATIVE=scheme == "native",
        BLOCK=_BLOCK,
    )

"""Comparing records with rows (token, position, chain link), in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from canary_kernels.device.findings import reserve
from canary_kernels.device.mixing import mix, mix3
from canary_kernels.device.search import find_run
from canary_kernels.scheme import Scheme

if TYPE_CHECKING:
    from canary_kernels.findings import Findings
    from canary_kernels.items import ItemRuns

_BLOCK = 256
_PROGRAMS = 2112
_WARPS = 4

FACTOR = tl.constexpr(0xD1342543DE82EF95 - (1 << 64))
FIELDS = tl.constexpr(8)
COLUMNS = tl.constexpr(2)
NO_PREVIOUS = tl.constexpr(-1)
UNCHECKED = tl.constexpr(-2)
FAIL_CHAIN = tl.constexpr(1)
FAIL_POSITION = tl.constexpr(2)
FAIL_TOKEN = tl.constexpr(32)
FAIL_RANGE = tl.constexpr(64)


@triton.jit
def listed_slot(pages, pages_len, start, end, offset, wanted, num_slots, PAGE_SIZE: tl.constexpr):
    """The slot at an offset of a page list [start, end), -1 where the place or the page is out of range."""
    index = tl.where(wanted & (offset >= 0), offset, 0) // PAGE_SIZE
    place = start + index
    listed = wanted & (offset >= 0) & (place >= 0) & (place < end) & (place < pages_len)
    page = tl.load(pages + place, mask=listed, other=-1)
    good = (page >= 0) & (page < num_slots // PAGE_SIZE)
    return tl.where(good, page * PAGE_SIZE + (offset - index * PAGE_SIZE), -1)


@triton.jit
def load_links(records, slot, wanted):
    """Token, position and previous hash of each slot's record; -1, -1 and 0 where none is wanted.

    Token and position come as one load of 16 bytes.
    """
    record = records + tl.where(wanted, slot, 0) * FIELDS
    pair = tl.load(record[:, None] + tl.arange(0, 2)[None, :], mask=wanted[:, None], other=-1)
    token, position = tl.split(pair)
    return token, position, tl.load(record + 2, mask=wanted, other=0)


@triton.jit
def link_after(prev_hash, token, position, key, NATIVE: tl.constexpr):
    """The hash that the record after this one must have as its previous hash."""
    if NATIVE:
        return prev_hash * FACTOR + mix(mix(token ^ key) ^ position)
    else:
        return mix3(prev_hash, token, position)


@triton.jit(
    do_not_specialize=["run_capacity", "item_capacity", "pages_len", "num_slots", "capacity", "item_base", "key"]
)
def links_kernel(
    records,
    pages,
    page_offsets,
    first_offsets,
    item_offsets,
    first_positions,
    first_prev_slots,
    run_count,
    item_count,
    tokens,
    heads,
    rows,
    count,
    run_capacity: tl.int64,
    item_capacity: tl.int64,
    pages_len: tl.int64,
    num_slots: tl.int64,
    capacity: tl.int64,
    item_base: tl.int64,
    key: tl.int64,
    PAGE_SIZE: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """prev_hash(item) = after(record of the item before it), position and token as the row says.

    Fixed grid; programs take tiles in turn. A tile has BLOCK - 1 items, and the one before them in lane 0, so that
    every item of a run finds the hash before it in the lane beside it: each record is read once, its first 24 bytes.
    Only a run's first item may have to read another record. A tile within one run finds that by one binary search, in
    other tiles each lane searches. Writes a row per failing item.

    Floor: per item 32 bytes of its record and 8 of its token, per page 8 bytes.
    """
    k = tl.minimum(tl.load(run_count), run_capacity)
    n = tl.minimum(tl.load(item_count), item_capacity)
    n = tl.where(k > 0, n, 0)
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * (BLOCK - 1)
    while first < n:
        item = first - 1 + lane  # [BLOCK]
        mask = (item >= 0) & (item < n)
        run = find_run(item_offsets, 1, k, tl.maximum(first - 1, 0), tl.minimum(first + BLOCK - 2, n - 1), item, mask)
        nth = item - tl.load(item_offsets + run, mask=mask, other=0)
        inside = mask & (item < tl.load(item_offsets + run + 1, mask=mask, other=0))
        offset = tl.load(first_offsets + run, mask=inside, other=0) + nth
        start = tl.load(page_offsets + run, mask=inside, other=0)
        end = tl.load(page_offsets + run + 1, mask=inside, other=0)
        slot = listed_slot(pages, pages_len, start, end, offset, inside, num_slots, PAGE_SIZE)
        token, position, prev_hash = load_links(records, slot, slot >= 0)
        stamped = position >= 0
        judged = stamped & (token >= 0)

        mask = mask & (lane > 0)
        follows = inside & (nth > 0)
        beside = tl.maximum(lane - 1, 0)
        expected = tl.gather(link_after(prev_hash, token, position, key, NATIVE), beside, 0)
        known = follows & (tl.gather(judged.to(tl.int32), beside, 0) != 0)
        given = tl.load(first_prev_slots + run, mask=mask & inside & (nth == 0), other=UNCHECKED)
        at_head = given == NO_PREVIOUS
        wild = given >= num_slots
        elsewhere = (given >= 0) & (given < num_slots)
        if tl.max((at_head | elsewhere).to(tl.int32), 0) > 0:
            other_token, other_position, other_hash = load_links(records, given, elsewhere)
            linked = link_after(other_hash, other_token, other_position, key, NATIVE)
            head = tl.load(heads + run, mask=at_head, other=0)
            expected = tl.where(at_head, head, tl.where(elsewhere, linked, expected))
            known = known | at_head | (elsewhere & (other_token >= 0) & (other_position >= 0))

        expected_position = tl.load(first_positions + run, mask=inside, other=0) + nth
        expected_token = tl.load(tokens + item, mask=mask, other=-1)
        bits = tl.where(judged & known & (prev_hash != expected), FAIL_CHAIN, 0)
        bits += tl.where(stamped & (position != expected_position), FAIL_POSITION, 0)
        bits += tl.where(judged & (expected_token != -1) & (token != expected_token), FAIL_TOKEN, 0)
        bits += tl.where((slot < 0) | wild, FAIL_RANGE, 0)
        bad = mask & (bits != 0)
        if tl.max(bad.to(tl.int32), 0) > 0:
            place = reserve(count, bad)
            stored = bad & (place >= 0) & (place < capacity)
            tl.store(rows + place * COLUMNS, item + item_base, mask=stored)
            tl.store(rows + place * COLUMNS + 1, bits.to(tl.int64), mask=stored)
        first += tl.num_programs(0).to(tl.int64) * (BLOCK - 1)


def enqueue_links(
    *,
    records: torch.Tensor,
    runs: ItemRuns,
    run_count: torch.Tensor,
    item_count: torch.Tensor,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    out: Findings,
    page_size: int,
    scheme: Scheme = "native",
    key: int = 0,
    item_base: int = 0,
) -> None:
    """Only launches: no allocation, no copy, no wait, so that a CUDA graph can capture it. `out` is not reset.

    Args:
        records: int64 [num_slots, 8].
        runs: tensors for a capacity of runs and pages; the first `run_count` runs count.
        run_count, item_count: int64 [1] on the device, clamped to the capacities of `runs.first_offsets` and `tokens`.
            Without runs there are no items. item_count is item_offsets[run_count]; items beyond are out of range.
        tokens: int64 [capacity of items].
        heads: int64 [capacity of runs].
        out: width 2.
        page_size: slots per page, compiled in.
        key: int64 bits of the native chain's secret.
        item_base: added to the item numbers.
    """
    programs = _PROGRAMS if records.is_cuda else 3
    links_kernel[(programs,)](
        records,
        runs.pages,
        runs.page_offsets,
        runs.first_offsets,
        runs.item_offsets,
        runs.first_positions,
        runs.first_prev_slots,
        run_count,
        item_count,
        tokens,
        heads,
        out.rows,
        out.count,
        runs.first_offsets.numel(),
        tokens.numel(),
        runs.pages.numel(),
        records.shape[0],
        out.rows.shape[0],
        item_base,
        key,
        PAGE_SIZE=page_size,
        NATIVE=scheme == "native",
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def links(
    records: torch.Tensor,
    runs: ItemRuns,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    out: Findings,
    *,
    page_size: int,
    scheme: Scheme,
    key: int,
    item_base: int,
) -> None:
    """Launches `links_kernel` for all of the runs and tokens."""
    enqueue_links(
        records=records,
        runs=runs,
        run_count=torch.full((1,), runs.first_offsets.numel(), dtype=torch.int64, device=records.device),
        item_count=torch.full((1,), tokens.numel(), dtype=torch.int64, device=records.device),
        tokens=tokens,
        heads=heads,
        out=out,
        page_size=page_size,
        scheme=scheme,
        key=key,
        item_base=item_base,
    )

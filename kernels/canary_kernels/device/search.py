"""Searching sorted offsets in Triton: whose item is this one?"""

from __future__ import annotations

import triton
import triton.language as tl

WIDTH = tl.constexpr(256)


@triton.jit
def find_owner(offsets, stride, count, wanted, mask):
    """The last of `offsets[:count]` that is not above `wanted`, by binary search; needs offsets[0] <= wanted."""
    low = tl.zeros_like(wanted)
    high = low + count
    span = count
    while span > 0:
        middle = (low + high) >> 1
        open_ = mask & (high - low > 1)
        below = tl.load(offsets + middle * stride, mask=open_, other=0) <= wanted
        low = tl.where(open_ & below, middle, low)
        high = tl.where(open_ & (below == 0), middle, high)
        span = span >> 1
    return low


@triton.jit
def find_owner_of_one(offsets, stride, count, wanted):
    """`find_owner` for a single value: each step loads WIDTH of the offsets and narrows the range as much."""
    lane = tl.arange(0, WIDTH).to(tl.int64)
    low = count * 0
    span = count
    while span > 1:
        step = (span + WIDTH - 1) // WIDTH
        inside = lane * step < span
        below = inside & (tl.load(offsets + (low + lane * step) * stride, mask=inside, other=0) <= wanted)
        passed = tl.maximum(tl.sum(below.to(tl.int64), 0) - 1, 0) * step
        low += passed
        span = tl.minimum(step, span - passed)
    return low


@triton.jit
def find_run(offsets, stride, count, first, last, wanted, mask):
    """`find_owner` of each lane of a tile of consecutive values: one search if one owner has all of [first, last]."""
    owner = find_owner_of_one(offsets, stride, count, first)
    owners = wanted * 0 + owner
    if tl.load(offsets + (owner + 1) * stride) <= last:
        owners = find_owner(offsets, stride, count, wanted, mask)
    return owners

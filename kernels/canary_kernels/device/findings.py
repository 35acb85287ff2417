"""Appending rows to compacted findings in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reserve(count, bad):
    """Row numbers for the lanes that are `bad`, taken from the counter with one atomic per program."""
    one = bad.to(tl.int64)
    total = tl.sum(one, axis=0)
    start = tl.atomic_add(count, total, mask=total > 0)
    return start + tl.cumsum(one, axis=0) - one

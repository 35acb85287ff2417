"""splitmix64 as a Triton device function; shared by every kernel. Import only where Triton kernels are built."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logical_shift_right(x, bits: tl.constexpr):
    """int64 x >> bits without sign extension (Triton's int64 >> is arithmetic)."""
    return (x.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def mix(x):
    """s(x) of CONTRACT part 1 on int64 bits: three xor-shifts and two wrapping multiplications."""
    x = (x ^ logical_shift_right(x, 30)) * -4658895280553007687
    x = (x ^ logical_shift_right(x, 27)) * -7723592293110705685
    return x ^ logical_shift_right(x, 31)


@triton.jit
def mix3(a, b, c):
    """mix3(a, b, c) = s(s(s(a) ^ b) ^ c)."""
    return mix(mix(mix(a) ^ b) ^ c)

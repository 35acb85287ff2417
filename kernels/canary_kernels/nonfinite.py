"""What makes a lane of an 8-byte word NaN or infinite, per dtype: the one table for reference and kernels."""

from __future__ import annotations

from dataclasses import dataclass

from canary_kernels.constants import MASK64


@dataclass(frozen=True, kw_only=True)
class NonfiniteRule:
    """Constants of one dtype, each repeated in every lane of an unsigned 64-bit word.

    A word w holds a NaN or infinity exactly when `v & top` is not 0, with `v = (w & mask) + add`, which cannot carry
    from lane to lane, or with `v = w & ~((w & mask) + add)` if `negative_zero`: the fnuz types have no infinity, and
    their one NaN is the pattern of a negative zero. A zero lane is finite in all of them, so a missing half word is.
    """

    mask: int
    add: int
    top: int
    negative_zero: bool = False

    def holds(self, word: int) -> bool:
        """Whether any lane of the unsigned 64-bit `word` is NaN or infinite."""
        value = ((word & self.mask) + self.add) & MASK64
        return bool((word & ~value if self.negative_zero else value) & self.top)


def _rule(bits: int, mask: int, add: int, *, negative_zero: bool = False) -> NonfiniteRule:
    lanes = MASK64 // ((1 << bits) - 1)
    return NonfiniteRule(mask=mask * lanes, add=add * lanes, top=(1 << (bits - 1)) * lanes, negative_zero=negative_zero)


NONFINITE_RULES = {
    "bfloat16": _rule(16, 0x7F80, 0x0080),
    "float16": _rule(16, 0x7C00, 0x0400),
    "float32": _rule(32, 0x7F800000, 0x00800000),
    "float8_e5m2": _rule(8, 0x7C, 0x04),
    "float8_e4m3fn": _rule(8, 0x7F, 0x01),
    "float8_e4m3fnuz": _rule(8, 0x7F, 0x7F, negative_zero=True),
    "float8_e5m2fnuz": _rule(8, 0x7F, 0x7F, negative_zero=True),
}
"""By torch's name of the dtype, without `torch.`; a region of any other dtype is not scanned."""

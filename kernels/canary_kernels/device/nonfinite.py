"""The NaN/Inf scan in Triton: a state per lane that remembers whether any word held a NaN or an infinity.

A scanned word costs six integer instructions by the rule, and a digest has few to spare. For the wide floats one fused
multiply-add per 4 bytes does it instead, on a pipe that the digest leaves idle: `state + element*0` stays 0 over finite
elements and is NaN for ever after any other. The interpreter has no inline assembly and takes the rule for all types.
"""

from __future__ import annotations

import triton
import triton.language as tl

from canary_kernels.constants import signed
from canary_kernels.nonfinite import NONFINITE_RULES

NOT_SCANNED = tl.constexpr(0)
SCANS = {name: number for number, name in enumerate(NONFINITE_RULES, start=1)}
"""The SCAN argument of a kernel by dtype; 0 (`NOT_SCANNED`) for none."""

_BF16 = tl.constexpr(SCANS["bfloat16"])
_FP16 = tl.constexpr(SCANS["float16"])
_WIDE_TYPES = () if triton.knobs.runtime.interpret else ("bfloat16", "float16", "float32")
_WIDE = tl.constexpr((False, *(name in _WIDE_TYPES for name in NONFINITE_RULES)))
"""Whether a type is scanned by multiply-add."""

_MASKS = tl.constexpr((0, *(signed(rule.mask) for rule in NONFINITE_RULES.values())))
_ADDS = tl.constexpr((0, *(signed(rule.add) for rule in NONFINITE_RULES.values())))
_TOPS = tl.constexpr((0, *(signed(rule.top) for rule in NONFINITE_RULES.values())))
_NEGATIVE_ZEROS = tl.constexpr((False, *(rule.negative_zero for rule in NONFINITE_RULES.values())))


@triton.jit
def _by_rule(word, SCAN: tl.constexpr):
    """int64 `word` -> the top bits of its lanes that are NaN or infinite, by `NonfiniteRule`; 0 if none is."""
    value = (word & _MASKS[SCAN]) + _ADDS[SCAN]
    if _NEGATIVE_ZEROS[SCAN]:
        value = word & ~value
    return value & _TOPS[SCAN]


@triton.jit
def _by_multiply_add(state, word, FMA: tl.constexpr):
    """int32 state + both halves of int64 `word` times 0, in the float type that the instruction FMA names."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 low, high, zero; mov.b64 {low, high}, $1; mov.b32 zero, 0; "
        + FMA
        + " $0, low, zero, $2; "
        + FMA
        + " $0, high, zero, $0; }",
        "=&r,l,r",
        [word, state],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def scan_start(like, SCAN: tl.constexpr):
    """The state before the first word, in the shape of `like`."""
    return tl.zeros_like(like).to(tl.int32 if _WIDE[SCAN] else tl.int64)


@triton.jit
def scan_step(state, word, SCAN: tl.constexpr):
    """The state after `word` (int64); NOT_SCANNED changes nothing."""
    if SCAN == NOT_SCANNED:
        return state
    elif not _WIDE[SCAN]:
        return state | _by_rule(word, SCAN)
    elif SCAN == _BF16:
        return _by_multiply_add(state, word, "fma.rn.bf16x2")
    elif SCAN == _FP16:
        return _by_multiply_add(state, word, "fma.rn.f16x2")
    else:
        return _by_multiply_add(state, word, "fma.rn.f32")


@triton.jit
def scan_found(state, SCAN: tl.constexpr):
    """Whether a word since `scan_start` held a NaN or an infinity, per lane."""
    if _WIDE[SCAN]:
        # A NaN of the state's own type, or 0 in every lane; sign extension adds copies of the upper half's top lane.
        return _by_rule(state.to(tl.int64), SCAN) != 0
    else:
        return state != 0

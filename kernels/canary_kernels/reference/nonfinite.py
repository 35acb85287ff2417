"""The NaN/Inf scan in torch."""

from __future__ import annotations

import torch

from canary_kernels.constants import signed
from canary_kernels.nonfinite import NonfiniteRule


def any_nonfinite(words: torch.Tensor, rule: NonfiniteRule, spare: torch.Tensor) -> torch.Tensor:
    """Whether each slot holds a NaN or infinity: bool [slots] from int64 words [regions, slots, words].

    `spare` is overwritten; same shape and dtype as `words`.
    """
    torch.bitwise_and(words, signed(rule.mask), out=spare).add_(signed(rule.add))
    if rule.negative_zero:
        spare.bitwise_not_().bitwise_and_(words)
    return spare.bitwise_and_(signed(rule.top)).any(dim=2).any(dim=0)

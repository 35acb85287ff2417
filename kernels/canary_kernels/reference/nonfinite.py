"""The NaN/Inf scan of gathered words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from canary_kernels.nonfinite import NonfiniteRule

U64 = npt.NDArray[np.uint64]


def any_nonfinite(words: U64, spare: U64, rule: NonfiniteRule, slots: int) -> npt.NDArray[np.bool_]:
    """Whether each slot holds a NaN or infinity: [slots], from the slots' words one after the other; `spare`, of the
    same shape, is overwritten."""
    np.bitwise_and(words, np.uint64(rule.mask), spare)
    np.add(spare, np.uint64(rule.add), spare)
    if rule.negative_zero:
        np.invert(spare, spare)
        np.bitwise_and(spare, words, spare)
    found: U64 = np.bitwise_or.reduce(spare.reshape(slots, -1), axis=1)
    bad: npt.NDArray[np.bool_] = (found & np.uint64(rule.top)) != 0
    return bad

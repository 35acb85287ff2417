"""splitmix64 on torch int64 tensors (wrapping arithmetic, logical shifts)."""

from __future__ import annotations

import torch

from canary_kernels.constants import SPLITMIX_MUL_1, SPLITMIX_MUL_2, signed

_MUL_1 = signed(SPLITMIX_MUL_1)
_MUL_2 = signed(SPLITMIX_MUL_2)


def _logical_shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 x >> bits without sign extension (torch's >> is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """s(x) of CONTRACT part 1 for each element of an int64 tensor; new tensor of the same shape."""
    x = (x ^ _logical_shift_right(x, 30)) * _MUL_1
    x = (x ^ _logical_shift_right(x, 27)) * _MUL_2
    return x ^ _logical_shift_right(x, 31)


def mix3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """mix3(a, b, c) = s(s(s(a) ^ b) ^ c), element by element."""
    return mix(mix(mix(a) ^ b) ^ c)

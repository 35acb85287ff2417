"""Sizes that live in device memory, and the grids of kernels that read them.

The kernels of a burst are captured in a CUDA graph and replayed with other sizes each time. So a size is an int64 on
the device, clamped to the capacity of the tensors, and the grid is fixed: programs take tiles in turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_PROGRAMS = 2112
"""Sixteen programs on each of 132 multiprocessors: all resident at four warps each."""


@triton.jit
def bounded_size(size, capacity):
    """The size at `size`, clamped to [0, capacity]."""
    return tl.minimum(tl.maximum(tl.load(size), 0), capacity)


def fixed_grid(capacity: int, block: int) -> tuple[int]:
    """One program per tile of a full capacity, at most `MAX_PROGRAMS`."""
    return (max(1, min(MAX_PROGRAMS, triton.cdiv(capacity, block))),)


def size_on_device(size: int, device: torch.device) -> torch.Tensor:
    """A size as the kernels read it, int64 [1]."""
    return torch.full((1,), size, dtype=torch.int64, device=device)

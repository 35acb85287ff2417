"""Moving a chunk's work lists to the device: as they are on the host, through pinned memory to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from canaryd.watch.burst import I64

RING = 4
"""Chunks in flight on a GPU before the host waits for the oldest."""


class Staging(Protocol):
    """Uploads int64 arrays; what `upload` returned is valid until the work queued before `release` is done."""

    def upload(self, arrays: Sequence[I64]) -> list[torch.Tensor]:
        """The arrays on the device, as 1-D int64 tensors."""

    def release(self) -> None:
        """The work that uses the last upload has been queued."""


class HostStaging:
    """Arrays as tensors over the same memory."""

    def upload(self, arrays: Sequence[I64]) -> list[torch.Tensor]:
        """Tensors that share the arrays' memory; read-only arrays are copied, since torch has no such tensors."""
        return [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]

    def release(self) -> None:
        """Nothing is in flight on the host."""


class CudaStaging:
    """A ring of pinned buffers and device buffers of `words` int64 each; one copy per chunk in the current stream."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._pinned = [torch.empty(words, dtype=torch.int64, pin_memory=True) for _ in range(RING)]
        self._device = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(RING)]
        self._done = [torch.cuda.Event() for _ in range(RING)]  # type: ignore[no-untyped-call]
        self._next = 0

    def upload(self, arrays: Sequence[I64]) -> list[torch.Tensor]:
        """Views of the device buffer, 16-byte aligned; waits if the buffer's last use is not over yet."""
        self._done[self._next].synchronize()
        pinned, device = self._pinned[self._next], self._device[self._next]
        host = pinned.numpy()
        views: list[torch.Tensor] = []
        start = 0
        for array in arrays:
            end = start + array.size
            np.copyto(host[start:end], array)
            views.append(device[start:end])
            start = end + (end & 1)
        device[:start].copy_(pinned[:start], non_blocking=True)
        return views

    def release(self) -> None:
        """Marks the end of the buffer's use in the current stream."""
        self._done[self._next].record()
        self._next = (self._next + 1) % RING

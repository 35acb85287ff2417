"""A burst's work list: int64 arrays of changing lengths, sent to fixed places on the device by one copy and
one launch.

The host packs the arrays one behind the other into one buffer, page-locked for a GPU; the copy sends a size class of
it, and the kernel spreads the arrays with the lengths of this burst. So both can stand in a CUDA graph, one graph per
class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

I64 = npt.NDArray[np.int64]

BLOCK = 256
"""Words of one block; each segment begins a new one, on the host and on the device."""
_SMALLEST_CLASS = 4096


class WorkList:
    """Segments of fixed capacities on the device, and the packed buffer on the host.

    The buffer's header, in whole blocks: the number of packed blocks; for S segments (a power of two) the first packed
    block of each; and S steps, how much further on the device a segment's blocks go than those of the segment before.

    Filled segment by segment: `begin`, `room` for those that have words, `seal`; then `enqueue`, or the replay of a
    graph that captured it. The packed buffer must not change before that is complete.

    Args:
        capacities: words of each segment.
        device: where the segments are.

    Attributes:
        classes: sizes in words of which one is sent, ascending, each four times the one before; the last holds all.
    """

    def __init__(self, capacities: Sequence[int], device: torch.device) -> None:
        blocks = [-(-capacity // BLOCK) for capacity in capacities]
        self._capacities = tuple(capacities)
        self._homes = [sum(blocks[:number]) for number in range(len(blocks))]
        self._table = 1 << (len(blocks) - 1).bit_length()
        self._header = -(-(1 + 2 * self._table) // BLOCK)
        self.target = torch.zeros(sum(blocks) * BLOCK, dtype=torch.int64, device=device)
        words = (self._header + sum(blocks)) * BLOCK
        self._source = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._packed = torch.zeros_like(self._source, device=device) if device.type == "cuda" else self._source
        self._words: I64 = self._source.numpy()
        self.classes: list[int] = []
        while not self.classes or self.classes[-1] < words:
            self.classes.append(min(words, 4 * self.classes[-1] if self.classes else _SMALLEST_CLASS))
        self.begin()

    def segment(self, number: int) -> torch.Tensor:
        """The segment's words on the device, int64 [capacity]."""
        start = self._homes[number] * BLOCK
        return self.target[start : start + self._capacities[number]]

    def begin(self) -> None:
        """Starts a new list."""
        self._firsts = [0] * self._table
        self._steps = [0] * self._table
        self._block = 0
        self._shift = 0

    def room(self, number: int, size: int) -> I64:
        """`size` words of the packed buffer for segment `number`, to be filled. Each segment once, in ascending order;
        segments without room keep what they have on the device.

        Raises:
            ValueError: the segment is smaller.
        """
        if size > self._capacities[number]:
            raise ValueError(f"segment {number} holds {self._capacities[number]} words, not {size}")
        shift = self._homes[number] - self._block
        self._firsts[number] = self._block
        self._steps[number] = shift - self._shift
        self._shift = shift
        start = (self._header + self._block) * BLOCK
        self._block += -(-size // BLOCK)
        return self._words[start : start + size]

    def seal(self) -> int:
        """Completes the list; the number of the smallest class that holds it."""
        self._words[: 1 + 2 * self._table] = [self._block, *self._firsts, *self._steps]
        return bisect_left(self.classes, (self._header + self._block) * BLOCK)

    def enqueue(self, number: int) -> None:
        """Sends and spreads what the packed buffer holds when that runs; imports Triton.

        Args:
            number: of the class, as `seal` returned it.
        """
        from canary_kernels.device.worklist import enqueue_spread

        words = self.classes[number]
        if self._packed is not self._source:
            self._packed[:words].copy_(self._source[:words], non_blocking=True)
        enqueue_spread(self._packed, self.target, segments=self._table, header_blocks=self._header, block=BLOCK)

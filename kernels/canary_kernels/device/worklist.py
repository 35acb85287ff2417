"""Spreading a packed work list over its segments, and handing a few words back to the host, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PROGRAMS = 264


@triton.jit(do_not_specialize=["packed_blocks", "target_blocks"])
def spread_kernel(
    packed,
    target,
    packed_blocks: tl.int64,
    target_blocks: tl.int64,
    SEGMENTS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies packed block b to target block b + shift, where shift is the sum of the steps of all segments that begin
    at or before b. A block that would come from or go to anywhere outside is left out.

    Fixed grid; programs take blocks in turn. Floor: 8 bytes read and 8 written per word; the header once per program.
    """
    blocks = tl.minimum(tl.load(packed), packed_blocks - HEADER)
    segment = tl.arange(0, SEGMENTS)
    first = tl.load(packed + 1 + segment)
    step = tl.load(packed + 1 + SEGMENTS + segment)
    lane = tl.arange(0, BLOCK)
    block = tl.program_id(0).to(tl.int64)
    while block < blocks:
        words = tl.load(packed + (HEADER + block) * BLOCK + lane)
        place = block + tl.sum(tl.where(first <= block, step, 0), axis=0)
        inside = (place >= 0) & (place < target_blocks)
        tl.store(target + place * BLOCK + lane, words, mask=inside)
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=["count"])
def hand_back_kernel(source, target, count: tl.int64, BLOCK: tl.constexpr):
    """target[i] = source[i] for i < count <= BLOCK; one program. The target is page-locked host memory."""
    lane = tl.arange(0, BLOCK)
    tl.store(target + lane, tl.load(source + lane, mask=lane < count), mask=lane < count)


def enqueue_spread(
    packed: torch.Tensor, target: torch.Tensor, *, segments: int, header_blocks: int, block: int
) -> None:
    """Launches `spread_kernel`; only launches, so that a CUDA graph can capture it.

    Args:
        packed: int64, header and packed blocks.
        target: int64. Both are whole numbers of blocks.
        segments, header_blocks, block: shape of the header, and words per block.
    """
    programs = _PROGRAMS if target.is_cuda else 3
    spread_kernel[(programs,)](
        packed,
        target,
        packed.numel() // block,
        target.numel() // block,
        SEGMENTS=segments,
        HEADER=header_blocks,
        BLOCK=block,
        num_warps=4,
    )


def enqueue_hand_back(source: torch.Tensor, target: torch.Tensor) -> None:
    """Launches `hand_back_kernel`: a copy node of a graph would take several times as long for a few words.

    Args:
        source: int64 [n] on the device, n at most 4096 or so.
        target: int64 [n], page-locked.
    """
    block = triton.next_power_of_2(source.numel())
    hand_back_kernel[(1,)](source, target, source.numel(), BLOCK=block, num_warps=1)

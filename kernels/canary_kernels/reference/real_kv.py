"""The real-KV fold in torch: serial over words, vectorised over slots."""

from __future__ import annotations

import torch

from canary_kernels.context import HashedSource
from canary_kernels.reference.mixing import mix

_CHUNK_BYTES = 128
"""Bytes of each slot that are gathered at a time; bounds the temporary at 128 bytes per slot."""


def fold_sources(sources: tuple[HashedSource, ...], slots: torch.Tensor) -> torch.Tensor:
    """The real-KV hash of each slot, int64 [n]; 0 without sources. All slots must be in range."""
    total = torch.zeros_like(slots)
    for source in sources:
        total = mix(total ^ _fold(source, slots))
    return total


def _fold(source: HashedSource, slots: torch.Tensor) -> torch.Tensor:
    """`acc = s(acc ^ word)` over the little-endian 8-byte words of each slot; int64 [n]."""
    acc = torch.zeros_like(slots)
    if not slots.numel():
        return acc
    by_slot = source.rows.as_strided(  # [rows, page, token bytes]
        (source.rows.shape[0], source.page_size, source.token_bytes), (source.row_stride, source.token_bytes, 1)
    )
    rows, columns = slots // source.page_size, slots % source.page_size
    for start in range(0, source.read_bytes, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, source.read_bytes)
        words = by_slot[:, :, start:stop][rows, columns].view(torch.int64)  # [n, words]
        for word in words.unbind(1):
            acc = mix(acc ^ word)
    return acc

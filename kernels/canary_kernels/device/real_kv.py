"""The real-KV fold in Triton: one lane per slot, serial over the slot's words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from canary_kernels.context import MAX_REAL_KV_SOURCES, HashedSource
from canary_kernels.device.mixing import mix

SOURCE_SCALARS = [
    f"{name}{number}"
    for number in range(MAX_REAL_KV_SOURCES)
    for name in ("row_words_", "page_size_", "token_words_", "read_words_")
]
"""The integer parameters by which `fold_sources` describes four sources; kernels must not specialise on them."""


@triton.jit
def _fold_source(slot, mask, rows, row_words, page_size, token_words, read_words):
    """acc = s(acc ^ word) over the little-endian 8-byte words of each slot; int64 like `slot`."""
    page = slot // page_size
    base = page * row_words + (slot - page * page_size) * token_words
    words = rows.to(tl.pointer_type(tl.int64))
    acc = tl.zeros_like(slot)
    word = slot_zero(read_words)
    while word < read_words:
        # read_bytes is a multiple of 16: two words per step
        acc = mix(acc ^ tl.load(words + base + word, mask=mask, other=0))
        acc = mix(acc ^ tl.load(words + base + word + 1, mask=mask, other=0))
        word += 2
    return acc


@triton.jit
def slot_zero(like):
    """An int64 scalar 0 that a loop may carry."""
    return like.to(tl.int64) * 0


@triton.jit
def fold_sources(
    slot,
    mask,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    row_words_0,
    page_size_0,
    token_words_0,
    read_words_0,
    row_words_1,
    page_size_1,
    token_words_1,
    read_words_1,
    row_words_2,
    page_size_2,
    token_words_2,
    read_words_2,
    row_words_3,
    page_size_3,
    token_words_3,
    read_words_3,
    NUM_SOURCES: tl.constexpr,
):
    """total = s(total ^ fold(source)) over the sources; 0 with none. Lanes outside the mask read nothing."""
    total = tl.zeros_like(slot)
    if NUM_SOURCES > 0:
        total = mix(total ^ _fold_source(slot, mask, rows_0, row_words_0, page_size_0, token_words_0, read_words_0))
    if NUM_SOURCES > 1:
        total = mix(total ^ _fold_source(slot, mask, rows_1, row_words_1, page_size_1, token_words_1, read_words_1))
    if NUM_SOURCES > 2:
        total = mix(total ^ _fold_source(slot, mask, rows_2, row_words_2, page_size_2, token_words_2, read_words_2))
    if NUM_SOURCES > 3:
        total = mix(total ^ _fold_source(slot, mask, rows_3, row_words_3, page_size_3, token_words_3, read_words_3))
    return total


def source_arguments(sources: Sequence[HashedSource], unused: torch.Tensor) -> list[torch.Tensor | int]:
    """The four pointers, then the integers in the order of `SOURCE_SCALARS`; `unused` stands in for missing sources."""
    missing = MAX_REAL_KV_SOURCES - len(sources)
    pointers = [source.rows for source in sources] + [unused] * missing
    scalars: list[int] = []
    for source in sources:
        scalars += (source.row_stride // 8, source.page_size, source.token_bytes // 8, source.read_bytes // 8)
    scalars += [1] * (4 * missing)
    return [*pointers, *scalars]

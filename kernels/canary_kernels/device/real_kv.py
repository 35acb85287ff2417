"""The real-KV fold in Triton: one lane per slot, serial over the slot's words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from canary_kernels.context import MAX_REAL_KV_SOURCES, HashedSource, VerifyPlan
from canary_kernels.device.mixing import mix

_ENTRIES_BLOCK = 128

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


@triton.jit(do_not_specialize=["slot_limit", "capacity", *SOURCE_SCALARS])
def verify_fold_kernel(
    slots,
    num_valid,
    enable,
    real_hashes,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    row_words_0: tl.int64,
    page_size_0: tl.int64,
    token_words_0: tl.int64,
    read_words_0: tl.int64,
    row_words_1: tl.int64,
    page_size_1: tl.int64,
    token_words_1: tl.int64,
    read_words_1: tl.int64,
    row_words_2: tl.int64,
    page_size_2: tl.int64,
    token_words_2: tl.int64,
    read_words_2: tl.int64,
    row_words_3: tl.int64,
    page_size_3: tl.int64,
    token_words_3: tl.int64,
    read_words_3: tl.int64,
    slot_limit: tl.int64,
    capacity: tl.int64,
    NUM_SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """real_hash[entry] = fold of the bytes of its slot, for each active entry whose slot is in [1, slot_limit).

    A tile of entries per program, one lane each. Reads the slots and the source bytes, writes one int64 per entry.

    Floor: the hashed bytes, 8 read and 8 written per entry.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    active = tl.load(num_valid).to(tl.int64)
    active = tl.minimum(tl.maximum(active, 0), capacity)
    active = tl.where(tl.load(enable) != 0, active, 0)
    if first < active:
        entry = first + tl.arange(0, BLOCK)  # [BLOCK]
        slot = tl.load(slots + entry, mask=entry < active, other=0)
        wanted = (slot > 0) & (slot < slot_limit)
        real = fold_sources(
            slot,
            wanted,
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
            NUM_SOURCES,
        )
        tl.store(real_hashes + entry, real, mask=wanted)


def fold_entries(plan: VerifyPlan, sources: Sequence[HashedSource], limit: int) -> torch.Tensor:
    """Real-KV hashes of a verify plan's active entries, int64 [capacity]; those of other entries, and of slots outside
    [1, limit), are uninitialised."""
    slots = plan.verify_slot_indices
    capacity = slots.shape[0]
    real_hashes = torch.empty(capacity, dtype=torch.int64, device=slots.device)
    if capacity:
        verify_fold_kernel[(triton.cdiv(capacity, _ENTRIES_BLOCK),)](
            slots,
            plan.verify_num_valid,
            plan.enable,
            real_hashes,
            *source_arguments(sources, slots),
            limit,
            capacity,
            NUM_SOURCES=len(sources),
            BLOCK=_ENTRIES_BLOCK,
        )
    return real_hashes

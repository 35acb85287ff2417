"""The real-KV fold in Triton: acc = s(acc ^ word) over a slot's words, serial for each slot, one slot per thread.

Neighbouring threads load neighbouring words, 128 bytes of a slot at a time; the compiler then hands each thread the
words of its own slot through shared memory. Sources are independent of each other until their folds are combined, so
each has programs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from canary_kernels.context import MAX_REAL_KV_SOURCES, HashedSource, VerifyPlan
from canary_kernels.device.mixing import mix

FOLD_SLOTS = 32
"""Slots per program of one warp."""

SOURCE_SCALARS = [
    f"{name}{number}"
    for number in range(MAX_REAL_KV_SOURCES)
    for name in ("row_pairs_", "page_size_", "token_pairs_", "read_pairs_")
]
"""The integer parameters by which `fold_source` knows four sources; kernels must not specialise on them."""

CHUNK = tl.constexpr(16)
"""Words per step: one cache line."""


@triton.jit
def fold_pair(acc, pair):
    """Two steps; pair int64 [slots, 2]."""
    first, second = tl.split(pair)
    return mix(mix(acc ^ first) ^ second)


@triton.jit
def fold_chunk(acc, chunk, SLOTS: tl.constexpr):
    """Sixteen steps; chunk int64 [slots, 16]. A split wants both halves in one thread: that is the transposition."""
    bits = tl.permute(tl.reshape(chunk, (SLOTS, 2, 2, 2, 2)), (0, 4, 3, 2, 1))
    low, high = tl.split(bits)
    low_0, low_1 = tl.split(low)
    high_0, high_1 = tl.split(high)
    pair_0, pair_1 = tl.split(low_0)
    pair_2, pair_3 = tl.split(low_1)
    pair_4, pair_5 = tl.split(high_0)
    pair_6, pair_7 = tl.split(high_1)
    acc = fold_pair(fold_pair(acc, pair_0), pair_1)
    acc = fold_pair(fold_pair(acc, pair_2), pair_3)
    acc = fold_pair(fold_pair(acc, pair_4), pair_5)
    return fold_pair(fold_pair(acc, pair_6), pair_7)


@triton.jit
def fold_words(words, pairs, SLOTS: tl.constexpr):
    """The fold of `pairs` times two words at each of the 16-byte aligned pointers `words` [slots], int64 [slots]."""
    acc = tl.zeros((SLOTS,), tl.int64)
    line = tl.arange(0, CHUNK)
    pair = tl.arange(0, 2)
    at = pairs * 0
    end = pairs * 2
    full = end // CHUNK * CHUNK
    chunk = tl.load(words[:, None] + line[None, :], mask=(line < full)[None, :], other=0)
    while at < full:
        at += CHUNK
        # on its way while this one is folded; the line behind the last one is not read
        following = tl.load(words[:, None] + (at + line)[None, :], mask=(at + line < full)[None, :], other=0)
        acc = fold_chunk(acc, chunk, SLOTS)
        chunk = following
    while at < end:
        acc = fold_pair(acc, tl.load(words[:, None] + (at + pair)[None, :]))
        at += 2
    return acc


@triton.jit
def of_source(number, value_0, value_1, value_2, value_3, NUM_SOURCES: tl.constexpr):
    """The value of source `number`."""
    value = value_0
    if NUM_SOURCES > 1:
        value = tl.where(number == 1, value_1, value)
    if NUM_SOURCES > 2:
        value = tl.where(number == 2, value_2, value)
    if NUM_SOURCES > 3:
        value = tl.where(number == 3, value_3, value)
    return value


@triton.jit
def fold_source(
    number,
    slot,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    row_pairs_0,
    page_size_0,
    token_pairs_0,
    read_pairs_0,
    row_pairs_1,
    page_size_1,
    token_pairs_1,
    read_pairs_1,
    row_pairs_2,
    page_size_2,
    token_pairs_2,
    read_pairs_2,
    row_pairs_3,
    page_size_3,
    token_pairs_3,
    read_pairs_3,
    NUM_SOURCES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The fold of one source's bytes of each slot, int64 [slots]; all slots must be in the source."""
    rows = of_source(
        number, rows_0.to(tl.int64), rows_1.to(tl.int64), rows_2.to(tl.int64), rows_3.to(tl.int64), NUM_SOURCES
    )
    row_pairs = of_source(number, row_pairs_0, row_pairs_1, row_pairs_2, row_pairs_3, NUM_SOURCES)
    page_size = of_source(number, page_size_0, page_size_1, page_size_2, page_size_3, NUM_SOURCES)
    token_pairs = of_source(number, token_pairs_0, token_pairs_1, token_pairs_2, token_pairs_3, NUM_SOURCES)
    read_pairs = of_source(number, read_pairs_0, read_pairs_1, read_pairs_2, read_pairs_3, NUM_SOURCES)
    # everything is a multiple of 16 bytes; the compiler must be able to tell, or it loads 8 at a time
    words = tl.multiple_of(rows.to(tl.pointer_type(tl.int64)), 16)
    page = slot // page_size
    start = (page * row_pairs + (slot - page * page_size) * token_pairs) * 2
    return fold_words(words + start, read_pairs, SLOTS)


@triton.jit
def combined_folds(folds, index, capacity, mask, NUM_SOURCES: tl.constexpr):
    """total = s(total ^ fold) over the sources; folds [sources, capacity]. 0 with no source."""
    total = tl.zeros_like(index)
    for number in tl.static_range(NUM_SOURCES):
        total = mix(total ^ tl.load(folds + number * capacity + index, mask=mask, other=0))
    return total


def source_arguments(sources: Sequence[HashedSource], unused: torch.Tensor) -> list[torch.Tensor | int]:
    """The four pointers, then the integers in the order of `SOURCE_SCALARS`; `unused` stands in for missing sources."""
    missing = MAX_REAL_KV_SOURCES - len(sources)
    pointers = [source.rows for source in sources] + [unused] * missing
    scalars: list[int] = []
    for source in sources:
        scalars += (source.row_stride // 16, source.page_size, source.token_bytes // 16, source.read_bytes // 16)
    scalars += [1] * (4 * missing)
    return [*pointers, *scalars]


@triton.jit(do_not_specialize=["slot_limit", "capacity", *SOURCE_SCALARS])
def verify_fold_kernel(
    slots,
    num_valid,
    enable,
    folds,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    row_pairs_0: tl.int64,
    page_size_0: tl.int64,
    token_pairs_0: tl.int64,
    read_pairs_0: tl.int64,
    row_pairs_1: tl.int64,
    page_size_1: tl.int64,
    token_pairs_1: tl.int64,
    read_pairs_1: tl.int64,
    row_pairs_2: tl.int64,
    page_size_2: tl.int64,
    token_pairs_2: tl.int64,
    read_pairs_2: tl.int64,
    row_pairs_3: tl.int64,
    page_size_3: tl.int64,
    token_pairs_3: tl.int64,
    read_pairs_3: tl.int64,
    slot_limit: tl.int64,
    capacity: tl.int64,
    NUM_SOURCES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """fold[source, entry] = acc = s(acc ^ word) over the bytes of the entry's slot, for active entries.

    Program (i, source): SLOTS entries, one per thread. Reads the slots and the source's bytes (those of slot 0 for
    entries whose slot is not in [0, slot_limit)), writes one int64 per entry and source.

    Floor: the hashed bytes, and 8 read and 8 written per entry and source.
    """
    first = tl.program_id(0).to(tl.int64) * SLOTS
    active = tl.load(num_valid).to(tl.int64)
    active = tl.minimum(tl.maximum(active, 0), capacity)
    active = tl.where(tl.load(enable) != 0, active, 0)
    if (first < active) & (slot_limit > 0):
        entry = first + tl.arange(0, SLOTS)  # [SLOTS]
        slot = tl.load(slots + entry, mask=entry < active, other=0)
        source = tl.program_id(1)
        fold = fold_source(
            source,
            tl.where((slot >= 0) & (slot < slot_limit), slot, 0),
            rows_0,
            rows_1,
            rows_2,
            rows_3,
            row_pairs_0,
            page_size_0,
            token_pairs_0,
            read_pairs_0,
            row_pairs_1,
            page_size_1,
            token_pairs_1,
            read_pairs_1,
            row_pairs_2,
            page_size_2,
            token_pairs_2,
            read_pairs_2,
            row_pairs_3,
            page_size_3,
            token_pairs_3,
            read_pairs_3,
            NUM_SOURCES,
            SLOTS,
        )
        tl.store(folds + source * capacity + entry, fold, mask=entry < active)


def fold_entries(plan: VerifyPlan, sources: Sequence[HashedSource], limit: int) -> torch.Tensor:
    """Each source's fold of a verify plan's active entries, int64 [sources, capacity], for `combined_folds`.

    What stands there for other entries, and for slots outside [0, limit), is undefined.
    """
    slots = plan.verify_slot_indices
    capacity = slots.shape[0]
    folds = torch.empty((len(sources), capacity), dtype=torch.int64, device=slots.device)
    if capacity:
        verify_fold_kernel[(triton.cdiv(capacity, FOLD_SLOTS), len(sources))](
            slots,
            plan.verify_num_valid,
            plan.enable,
            folds,
            *source_arguments(sources, slots),
            limit,
            capacity,
            NUM_SOURCES=len(sources),
            SLOTS=FOLD_SLOTS,
            num_warps=1,
        )
    return folds

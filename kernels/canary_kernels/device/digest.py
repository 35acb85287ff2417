"""Digest and sum in Triton: one tile of slots by words per step, regions through a table of addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from canary_kernels.device.mixing import mix
from canary_kernels.layout import GroupLayout, Region
from canary_kernels.reference.digest import keys
from canary_kernels.scheme import Scheme

_TILE = 1024
"""Words of one tile: eight per thread at four warps."""
_MAX_WORD_BLOCK = 256
_REGIONS_PER_PROGRAM = 8
_FOLD_SLOTS = 32

# Columns of the region table (int64): address, strides in units of the loads, and what a slot holds.
NUMBER = tl.constexpr(0)
ADDRESS = tl.constexpr(1)
PAGE_STRIDE = tl.constexpr(2)
SLOT_STRIDE = tl.constexpr(3)
PIECE_STRIDE = tl.constexpr(4)
PIECE_LENGTH = tl.constexpr(5)
LENGTH = tl.constexpr(6)
KEY = tl.constexpr(7)
COLUMNS = tl.constexpr(8)


@triton.jit
def whole_words(entry, page, offset, valid, words, number):
    """Words [slots, words] of an aligned region without pieces, as 16-byte loads where the lanes allow it."""
    base = tl.multiple_of(tl.load(entry + ADDRESS).to(tl.pointer_type(tl.int64)), 16)
    length = tl.multiple_of(tl.load(entry + LENGTH), 2)
    page_stride = tl.multiple_of(tl.load(entry + PAGE_STRIDE), 2)
    slot_stride = tl.multiple_of(tl.load(entry + SLOT_STRIDE), 2)
    row = page * page_stride + offset * slot_stride
    exists = valid[:, None] & (words < length)[None, :]
    value = tl.load(base + row[:, None] + words[None, :], mask=exists, other=0)
    return value, exists


@triton.jit
def half_words(entry, page, offset, valid, words, number):
    """Words [slots, words] of any region, from two 4-byte loads each; a missing upper half is 0."""
    base = tl.load(entry + ADDRESS).to(tl.pointer_type(tl.int32))
    length = tl.load(entry + LENGTH)
    row = page * tl.load(entry + PAGE_STRIDE) + offset * tl.load(entry + SLOT_STRIDE)
    piece_stride = tl.load(entry + PIECE_STRIDE)
    piece_length = tl.load(entry + PIECE_LENGTH)
    low = words * 2
    low_piece = low // piece_length
    low_at = low_piece * piece_stride + (low - low_piece * piece_length)
    high = low + 1
    high_piece = high // piece_length
    high_at = high_piece * piece_stride + (high - high_piece * piece_length)
    exists = valid[:, None] & (low < length)[None, :]
    has_high = valid[:, None] & (high < length)[None, :]
    low_value = tl.load(base + row[:, None] + low_at[None, :], mask=exists, other=0)
    high_value = tl.load(base + row[:, None] + high_at[None, :], mask=has_high, other=0)
    value = (low_value.to(tl.int64) & 0xFFFFFFFF) | (high_value.to(tl.int64) << 32)
    return value, exists


@triton.jit(do_not_specialize=["capacity", "num_slots", "page_size", "regions", "all_regions"])
def digest_kernel(
    slots,
    count,
    table,
    word_keys,
    digests,
    sums,
    region_bytes,
    capacity: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    regions: tl.int64,
    all_regions: tl.int64,
    WHOLE: tl.constexpr,
    WITH_BYTES: tl.constexpr,
    REGIONS: tl.constexpr,
    WORD_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program (i, j): SLOTS slots from i*SLOTS on, REGIONS table rows from j*REGIONS on; adds to digests and sums,
    which must be zero before."""
    n = tl.minimum(tl.load(count), capacity)
    item = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(slots + item, mask=item < n, other=-1)
    valid = (slot >= 0) & (slot < num_slots)
    slot = tl.where(valid, slot, 0)
    page = slot // page_size
    offset = slot - page * page_size
    lane = tl.arange(0, WORDS).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * REGIONS
    digest = tl.zeros([SLOTS, WORDS], dtype=tl.int64)
    total = tl.zeros([SLOTS, WORDS], dtype=tl.int64)
    for step in range(REGIONS * WORD_BLOCKS):
        number = first + step // WORD_BLOCKS
        block = step % WORD_BLOCKS
        here = valid & (number < regions)
        entry = table + tl.minimum(number, regions - 1) * COLUMNS
        words = block * WORDS + lane
        if WHOLE:
            value, exists = whole_words(entry, page, offset, here, words, number)
        else:
            value, exists = half_words(entry, page, offset, here, words, number)
        key = tl.load(entry + KEY) ^ tl.load(word_keys + words)
        mixed = tl.where(exists, mix(value ^ key[None, :]), 0)
        total += value
        if WITH_BYTES:
            if block == 0:
                digest = tl.zeros([SLOTS, WORDS], dtype=tl.int64)
            digest += mixed
            if block == WORD_BLOCKS - 1:
                part = tl.sum(digest, axis=1)
                top = ((part >> 56) & 0xFF).to(tl.uint8)
                target = region_bytes + item * all_regions + tl.load(entry + NUMBER)
                tl.store(target, top, mask=here)
                tl.atomic_add(digests + item, part, mask=here)
        else:
            digest += mixed
    if not WITH_BYTES:
        tl.atomic_add(digests + item, tl.sum(digest, axis=1), mask=valid)
    tl.atomic_add(sums + item, tl.sum(total, axis=1), mask=valid)


@triton.jit(do_not_specialize=["capacity", "num_slots", "page_size"])
def fold_kernel(
    slots,
    count,
    table,
    folds,
    sums,
    capacity: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    SLOTS: tl.constexpr,
):
    """Program (i, r): the fold of region r for SLOTS slots, one per thread, into folds [R, capacity]; adds to sums."""
    n = tl.minimum(tl.load(count), capacity)
    item = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    mask = item < n
    slot = tl.load(slots + item, mask=mask, other=-1)
    valid = (slot >= 0) & (slot < num_slots)
    slot = tl.where(valid, slot, 0)
    page = slot // page_size
    offset = slot - page * page_size
    region = tl.program_id(1).to(tl.int64)
    entry = table + region * COLUMNS
    base = tl.load(entry + ADDRESS).to(tl.pointer_type(tl.int32))
    row = page * tl.load(entry + PAGE_STRIDE) + offset * tl.load(entry + SLOT_STRIDE)
    piece_stride = tl.load(entry + PIECE_STRIDE)
    piece_length = tl.load(entry + PIECE_LENGTH)
    length = tl.load(entry + LENGTH)
    accumulator = tl.zeros([SLOTS], dtype=tl.int64)
    total = tl.zeros([SLOTS], dtype=tl.int64)
    at = length * 0
    while at < length:
        piece = at // piece_length
        low = tl.load(base + row + piece * piece_stride + (at - piece * piece_length), mask=valid, other=0)
        at += 1
        piece = at // piece_length
        high = tl.load(base + row + piece * piece_stride + (at - piece * piece_length), mask=valid, other=0)
        at += 1
        word = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        accumulator = mix(accumulator ^ word)
        total += word
    tl.store(folds + region * capacity + item, accumulator, mask=mask)
    tl.atomic_add(sums + item, total, mask=valid)


@triton.jit(do_not_specialize=["capacity", "num_slots", "regions"])
def fold_total_kernel(
    slots,
    count,
    folds,
    digests,
    region_bytes,
    capacity: tl.int64,
    num_slots: tl.int64,
    regions: tl.int64,
    WITH_BYTES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """total = s(total ^ fold) over the regions in order, 0 for slots out of range."""
    n = tl.minimum(tl.load(count), capacity)
    item = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    mask = item < n
    slot = tl.load(slots + item, mask=mask, other=-1)
    valid = (slot >= 0) & (slot < num_slots)
    total = tl.zeros([SLOTS], dtype=tl.int64)
    region = regions.to(tl.int64) * 0
    while region < regions:
        fold = tl.load(folds + region * capacity + item, mask=mask, other=0)
        total = mix(total ^ fold)
        if WITH_BYTES:
            top = ((fold >> 56) & 0xFF).to(tl.uint8)
            tl.store(region_bytes + item * regions + region, top, mask=valid)
        region += 1
    tl.store(digests + item, tl.where(valid, total, 0), mask=mask)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Regions that one launch can read together."""

    table: torch.Tensor
    whole: bool
    word_blocks: int
    slots: int
    words: int


def _aligned(region: Region) -> bool:
    """Whether each slot is one run of 16-byte aligned words."""
    sizes = (region.page_stride, region.slot_stride, region.piece_bytes, region.memory.data_ptr() + region.offset)
    return region.pieces == 1 and not any(size % 16 for size in sizes)


@dataclass
class DeviceDigest:
    """Tables of one layout on its device, made once. The layout's memory must stay mapped."""

    layout: GroupLayout
    _parts: list[_Part] = field(init=False)
    _word_keys: torch.Tensor = field(init=False)
    _fold_table: torch.Tensor = field(init=False)
    _folds: torch.Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        device = self.layout.device
        numbered = list(enumerate(self.layout.regions))
        word_keys, region_keys = keys(self.layout, device)
        key_of = region_keys.tolist()
        self._parts = []
        for whole in (True, False):
            chosen = [(number, region) for number, region in numbered if _aligned(region) is whole]
            if chosen:
                self._parts.append(self._part(chosen, key_of, whole=whole))
        self._fold_table = self._table(numbered, key_of, unit=4)
        longest = max(part.word_blocks * part.words for part in self._parts)
        self._word_keys = torch.zeros(max(longest, word_keys.numel()), dtype=torch.int64, device=device)
        self._word_keys[: word_keys.numel()] = word_keys

    def _part(self, chosen: list[tuple[int, Region]], key_of: list[int], *, whole: bool) -> _Part:
        longest = max(region.words for _, region in chosen)
        words = min(_MAX_WORD_BLOCK, triton.next_power_of_2(longest))
        return _Part(
            table=self._table(chosen, key_of, unit=8 if whole else 4),
            whole=whole,
            word_blocks=triton.cdiv(longest, words),
            slots=max(1, min(32, _TILE // words)),
            words=words,
        )

    def _table(self, chosen: list[tuple[int, Region]], key_of: list[int], *, unit: int) -> torch.Tensor:
        rows = [
            [
                number,
                region.memory.data_ptr() + region.offset,
                region.page_stride // unit,
                region.slot_stride // unit,
                region.piece_stride // unit,
                region.piece_bytes // unit,
                region.slot_bytes // unit,
                key_of[number],
            ]
            for number, region in chosen
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.layout.device)

    def __call__(
        self,
        slots: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
        scheme: Scheme,
    ) -> None:
        """Fills digests [n], sums [n] and, if given, region_bytes [n, R]; see `launch_digest`."""
        digests.zero_()
        sums.zero_()
        if region_bytes is not None:
            region_bytes.zero_()
        if scheme == "sglang":
            self.reserve(slots.numel())
        count = torch.full((1,), slots.numel(), dtype=torch.int64, device=slots.device)
        self.enqueue(slots, count, digests, sums, region_bytes=region_bytes, scheme=scheme)

    def reserve(self, capacity: int) -> None:
        """Allocates the scratch that `enqueue` needs in scheme sglang for up to `capacity` slots."""
        regions = len(self.layout.regions)
        if self._folds is None or self._folds.numel() < regions * capacity:
            self._folds = torch.empty(regions * capacity, dtype=torch.int64, device=self.layout.device)

    def enqueue(
        self,
        slots: torch.Tensor,
        count: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        *,
        region_bytes: torch.Tensor | None = None,
        scheme: Scheme = "native",
    ) -> None:
        """Only launches: no allocation, no copy, no wait, so that a CUDA graph can capture it.

        Args:
            slots: int64 [capacity]; the first `count` of them are digested.
            count: int64 [1] on the device; values outside [0, capacity] are clamped.
            digests, sums: int64 [capacity]; the caller has zeroed the first `count`, nothing behind them is written.
            region_bytes: uint8 [capacity, R] or None, zeroed likewise.
            scheme: "sglang" needs `reserve(capacity)` before.
        """
        if scheme == "sglang":
            self._fold(slots, count, digests, sums, region_bytes)
            return
        capacity = slots.numel()
        for part in self._parts:
            regions = part.table.shape[0]
            grid = (triton.cdiv(capacity, part.slots), triton.cdiv(regions, _REGIONS_PER_PROGRAM))
            digest_kernel[grid](
                slots,
                count,
                part.table,
                self._word_keys,
                digests,
                sums,
                digests if region_bytes is None else region_bytes,
                capacity,
                self.layout.num_slots,
                self.layout.page_size,
                regions,
                len(self.layout.regions),
                WHOLE=part.whole,
                WITH_BYTES=region_bytes is not None,
                REGIONS=_REGIONS_PER_PROGRAM,
                WORD_BLOCKS=part.word_blocks,
                SLOTS=part.slots,
                WORDS=part.words,
                num_warps=4,
                num_stages=3,
            )

    def _fold(
        self,
        slots: torch.Tensor,
        count: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
    ) -> None:
        capacity = slots.numel()
        regions = len(self.layout.regions)
        if self._folds is None or self._folds.numel() < regions * capacity:
            raise ValueError(f"reserve({capacity}) was not called: a captured launch cannot allocate scratch")
        blocks = triton.cdiv(capacity, _FOLD_SLOTS)
        fold_kernel[(blocks, regions)](
            slots,
            count,
            self._fold_table,
            self._folds,
            sums,
            capacity,
            self.layout.num_slots,
            self.layout.page_size,
            SLOTS=_FOLD_SLOTS,
            num_warps=1,
        )
        fold_total_kernel[(blocks,)](
            slots,
            count,
            self._folds,
            digests,
            digests if region_bytes is None else region_bytes,
            capacity,
            self.layout.num_slots,
            regions,
            WITH_BYTES=region_bytes is not None,
            SLOTS=_FOLD_SLOTS,
            num_warps=1,
        )

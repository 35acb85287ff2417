"""The native digest and sum in Triton: tiles of dense lanes, regions through a table of addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from canary_kernels.device.fold import DeviceFold
from canary_kernels.device.mixing import mix
from canary_kernels.device.nonfinite import NOT_SCANNED, SCANS, scan_found, scan_start, scan_step
from canary_kernels.device.regions import Part, parts_of, programs_on
from canary_kernels.device.sizes import bounded_size
from canary_kernels.layout import GroupLayout
from canary_kernels.reference.digest import keys
from canary_kernels.scheme import Scheme

_WARPS = 4
_STAGES = 3
_WAVE_PER_SM = 24
"""Programs per multiprocessor that the work is split into where there is enough of it: four times as many as fit at
once, so that few stand idle at the end."""
_BYTES_PER_SM = 6
"""Programs per multiprocessor of the region bytes' fixed grid."""

_SIZES = [
    "capacity",
    "num_slots",
    "page_size",
    "page_stride",
    "slot_stride",
    "piece_stride",
    "piece_length",
    "length",
    "regions",
    "wave",
]


@triton.jit
def lane_offsets(row, at, piece_stride, piece_length, PIECES: tl.constexpr, RUN: tl.constexpr):
    """Offsets [rows, lanes] of load number `at` (int32) of slots that begin at `row` [rows, 1], through their pieces.

    RUN consecutive lanes are consecutive and aligned: the compiler learns it here, on the operation itself, since a
    hint on the result of a call is lost when the call is inlined.
    """
    if PIECES:
        piece = at // piece_length
        offset = row + piece.to(tl.int64) * piece_stride + (at - piece * piece_length)
    else:
        offset = row + at
    return tl.max_contiguous(tl.multiple_of(offset, [1, RUN]), [1, RUN])


@triton.jit
def join_halves(low, high):
    """The word of two int32 halves."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def sum_pairs(x, RUN: tl.constexpr):
    """Sums of RUN (1 or 2) neighbouring lanes of x [rows, lanes]: fewer registers, and a three-way addition is one
    instruction."""
    if RUN == 2:
        return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    else:
        return x


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["slots", "digests", "sums", "nonfinite"])
def digest_kernel(
    slots,
    count,
    table,
    word_keys,
    digests,
    sums,
    nonfinite,
    capacity: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    page_stride: tl.int64,
    slot_stride: tl.int64,
    piece_stride: tl.int64,
    piece_length: tl.int32,
    length: tl.int32,
    regions: tl.int32,
    wave: tl.int32,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    WHOLE: tl.constexpr,
    SCAN: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds D = sum over (r, j) of s(w_rj ^ key(r, j)) and S = sum of w_rj to digests and sums, for the first `count`
    slots and the regions of one part (see `Part` for the strides), and sets nonfinite to 1 where SCAN finds any.

    A tile has ROWS rows of LANES consecutive words of one slot; a slot that is longer (not WHOLE) has several rows. A
    program takes one tile and some of the regions, so many that there are about `wave` programs with work, and the
    others end at once. Where a lane reads is computed before the loop over the regions, which adds an address to it.
    Lanes without work read word 0 or 1 again and are dropped after the loop, those of slots out of range likewise read
    slot 0: no load needs a mask.

    Reads every byte of count * regions slots once, and writes 16 bytes per row of a tile and program: the floor is the
    read.
    """
    run: tl.constexpr = 2 if UNIT == 16 else 1
    n = bounded_size(count, capacity)
    words = length if UNIT != 4 else (length + 1) // 2
    rows_per_slot = 1 if WHOLE else (words + LANES - 1) // LANES
    tiles = (n * rows_per_slot + ROWS - 1) // ROWS
    share = tl.minimum((tiles * regions + wave - 1) // wave, regions).to(tl.int32)
    splits = (regions + share - 1) // tl.maximum(share, 1)
    program = tl.program_id(0).to(tl.int64)
    if program >= tiles * splits:
        return
    tile = program // splits
    first = (program - tile * splits).to(tl.int32) * share
    last = tl.minimum(first + share, regions)
    if WHOLE:
        item = tile * ROWS + tl.arange(0, ROWS)
        word = tl.arange(0, LANES)[None, :] + tl.zeros([ROWS, 1], dtype=tl.int32)
    else:
        first_item = tile * ROWS // rows_per_slot
        number = (tile * ROWS - first_item * rows_per_slot).to(tl.int32) + tl.arange(0, ROWS)
        skipped = number // rows_per_slot
        item = first_item + skipped
        word = (number - skipped * rows_per_slot)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    exists = word < words
    word = tl.where(exists, word, word & (run - 1))
    word = tl.max_contiguous(tl.multiple_of(word, [1, run]), [1, run])
    slot = tl.load(slots + item, mask=item < n, other=-1)
    valid = (slot >= 0) & (slot < num_slots)
    slot = tl.where(valid, slot, 0)
    page = slot // page_size
    row = (page * page_stride + (slot - page * page_size) * slot_stride)[:, None]
    word_key = tl.load(word_keys + word)
    digest = tl.zeros([ROWS, LANES // run], dtype=tl.int64)
    total = tl.zeros([ROWS, LANES // run], dtype=tl.int64)
    state = scan_start(word_key, SCAN)
    if UNIT == 4:
        has_high = word * 2 + 1 < length
        high_at = lane_offsets(row, tl.where(has_high, word * 2 + 1, 0), piece_stride, piece_length, PIECES, 1)
        low_at = lane_offsets(row, word * 2, piece_stride, piece_length, PIECES, 1)
        high_mask = tl.where(has_high, -1, 0)
    else:
        at = lane_offsets(row, word, piece_stride, piece_length, PIECES, run)
    for region in tl.range(first, last, num_stages=STAGES):
        address = tl.load(table + 2 * region)
        region_key = tl.load(table + 2 * region + 1)
        if UNIT == 4:
            base = address.to(tl.pointer_type(tl.int32))
            value = join_halves(tl.load(base + low_at), tl.load(base + high_at) & high_mask)
        elif UNIT == 8:
            value = tl.load(address.to(tl.pointer_type(tl.int64)) + at)
        else:
            value = tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16) + at)
        digest += sum_pairs(mix(value ^ word_key ^ region_key), run)
        total += sum_pairs(value, run)
        state = scan_step(state, value, SCAN)
    summed = sum_pairs(exists.to(tl.int32), run) > 0  # both of a pair exist, or neither
    tl.atomic_add(digests + item, tl.sum(tl.where(summed, digest, 0), axis=1), mask=valid, sem="relaxed")
    tl.atomic_add(sums + item, tl.sum(tl.where(summed, total, 0), axis=1), mask=valid, sem="relaxed")
    if SCAN != NOT_SCANNED:
        found = tl.max((scan_found(state, SCAN) & exists).to(tl.int32), axis=1)
        tl.store(nonfinite + item, found.to(tl.uint8), mask=valid & (found > 0))


@triton.jit(do_not_specialize=[*_SIZES[:-1], "all_regions"], do_not_specialize_on_alignment=["slots", "region_bytes"])
def region_bytes_kernel(
    slots,
    count,
    table,
    numbers,
    word_keys,
    region_bytes,
    capacity: tl.int64,
    num_slots: tl.int64,
    page_size: tl.int64,
    page_stride: tl.int64,
    slot_stride: tl.int64,
    piece_stride: tl.int64,
    piece_length: tl.int32,
    length: tl.int32,
    regions: tl.int32,
    all_regions: tl.int64,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Stores the top 8 bits of each region's share of the digest in region_bytes [capacity, all_regions], for the first
    `count` slots and the regions of one part. A tile has ROWS pairs (slot, region). It reads what `digest_kernel` reads
    once more: few slots need region bytes, and the digest need not pay for them."""
    n = bounded_size(count, capacity)
    words = length if UNIT != 4 else (length + 1) // 2
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    while tl.min(pair, axis=0) < n * regions:
        item = pair // regions
        region = pair - item * regions
        slot = tl.load(slots + item, mask=item < n, other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        slot = tl.where(valid, slot, 0)
        page = slot // page_size
        row = (page * page_stride + (slot - page * page_size) * slot_stride)[:, None]
        address = tl.load(table + 2 * region)
        region_key = tl.load(table + 2 * region + 1)
        share = tl.zeros([ROWS, LANES], dtype=tl.int64)
        first = length * 0
        while first < words:
            word = first + tl.arange(0, LANES)[None, :] + tl.zeros([ROWS, 1], dtype=tl.int32)
            exists = valid[:, None] & (word < words)
            if UNIT == 4:
                base = address.to(tl.pointer_type(tl.int32))[:, None]
                low_at = lane_offsets(row, word * 2, piece_stride, piece_length, True, 1)
                high_at = lane_offsets(row, word * 2 + 1, piece_stride, piece_length, True, 1)
                low = tl.load(base + low_at, mask=exists, other=0)
                high = tl.load(base + high_at, mask=exists & (word * 2 + 1 < length), other=0)
                value = join_halves(low, high)
            else:
                base = address.to(tl.pointer_type(tl.int64))[:, None]
                at = lane_offsets(row, word, piece_stride, piece_length, True, 1)
                value = tl.load(base + at, mask=exists, other=0)
            key = tl.load(word_keys + word, mask=exists, other=0) ^ region_key[:, None]
            share += tl.where(exists, mix(value ^ key), 0)
            first += LANES
        top = ((tl.sum(share, axis=1) >> 56) & 0xFF).to(tl.uint8)
        tl.store(region_bytes + item * all_regions + tl.load(numbers + region), top, mask=valid)
        pair += tl.num_programs(0).to(tl.int64) * ROWS


@dataclass
class DeviceDigest:
    """Tables of one layout on its device, made once. The layout's memory must stay mapped."""

    layout: GroupLayout
    _parts: list[Part] = field(init=False)
    _word_keys: torch.Tensor = field(init=False)
    _wave: int = field(init=False)
    _fold: DeviceFold | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        device = self.layout.device
        self._parts = parts_of(self.layout)
        self._word_keys, _ = keys(self.layout, device)
        self._wave = programs_on(device, _WAVE_PER_SM)

    def __call__(
        self,
        slots: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
        scheme: Scheme,
        nonfinite: torch.Tensor | None = None,
    ) -> None:
        """Fills digests [n], sums [n] and, if given, region_bytes [n, R] and nonfinite [n]; see `launch_digest`."""
        for output in (digests, sums, region_bytes, nonfinite):
            if output is not None:
                output.zero_()
        if scheme == "sglang":
            self.reserve(slots.numel())
        count = torch.full((1,), slots.numel(), dtype=torch.int64, device=slots.device)
        self.enqueue(slots, count, digests, sums, region_bytes=region_bytes, nonfinite=nonfinite, scheme=scheme)

    def reserve(self, capacity: int) -> None:
        """Allocates the scratch that `enqueue` needs in scheme sglang for up to `capacity` slots."""
        if self._fold is None:
            self._fold = DeviceFold(self.layout, self._parts)
        self._fold.reserve(capacity)

    def enqueue(
        self,
        slots: torch.Tensor,
        count: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        *,
        region_bytes: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
        scheme: Scheme = "native",
    ) -> None:
        """Only launches: no allocation, no copy, no wait, so that a CUDA graph can capture it.

        One launch per geometry of regions (`Part`), and one more each if region_bytes is given. Nothing is compiled
        again because a size changed.

        Args:
            slots: int64 [capacity]; the first `count` of them are digested.
            count: int64 [1] on the device; values outside [0, capacity] are clamped.
            digests, sums: int64 [capacity]; the caller has zeroed the first `count`, nothing behind them is written.
            region_bytes: uint8 [capacity, R] or None, zeroed likewise.
            nonfinite: uint8 [capacity] or None, zeroed likewise; regions of no known dtype are not scanned.
            scheme: "sglang" needs `reserve(capacity)` before.
        """
        if scheme == "sglang":
            if self._fold is None:
                raise ValueError("reserve was not called: a captured launch cannot allocate scratch")
            self._fold.enqueue(slots, count, digests, sums, region_bytes=region_bytes, nonfinite=nonfinite)
            return
        for part in self._parts:
            sizes = (
                slots.numel(),
                self.layout.num_slots,
                self.layout.page_size,
                part.page_stride,
                part.slot_stride,
                part.piece_stride,
                part.piece_length,
                part.length,
                part.regions,
            )
            scan = NOT_SCANNED.value if nonfinite is None or part.dtype is None else SCANS[part.dtype]
            digest_kernel[(part.programs(slots.numel(), self._wave),)](
                slots,
                count,
                part.table,
                self._word_keys,
                digests,
                sums,
                digests if nonfinite is None else nonfinite,
                *sizes,
                self._wave,
                UNIT=part.unit,
                PIECES=part.in_pieces,
                WHOLE=part.rows_per_slot == 1,
                SCAN=scan,
                ROWS=part.rows,
                LANES=part.lanes,
                STAGES=_STAGES,
                num_warps=_WARPS,
            )
            if region_bytes is not None:
                region_bytes_kernel[(programs_on(slots.device, _BYTES_PER_SM),)](
                    slots,
                    count,
                    part.table,
                    part.numbers,
                    self._word_keys,
                    region_bytes,
                    *sizes,
                    len(self.layout.regions),
                    UNIT=part.unit,
                    ROWS=part.rows,
                    LANES=part.lanes,
                    num_warps=_WARPS,
                )

"""The sglang fold over all regions of a group in Triton: one lane per slot and region, serial over the words."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from canary_kernels.device.mixing import mix
from canary_kernels.device.nonfinite import NOT_SCANNED, SCANS, scan_found, scan_start, scan_step
from canary_kernels.device.regions import Part, programs_on
from canary_kernels.layout import GroupLayout

_SLOTS = 32
_PROGRAMS_PER_SM = 32


@triton.jit(
    do_not_specialize=[
        "capacity",
        "num_slots",
        "page_size",
        "page_stride",
        "slot_stride",
        "piece_stride",
        "piece_length",
        "length",
        "regions",
    ],
    do_not_specialize_on_alignment=["slots", "sums", "nonfinite"],
)
def fold_kernel(
    slots,
    count,
    table,
    numbers,
    folds,
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
    UNIT: tl.constexpr,
    SCAN: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """acc = s(acc ^ word) over the words of a slot in a region, into folds [R, capacity], for the first `count` slots
    and the regions of one part; adds the words to sums and sets nonfinite to 1 where SCAN finds any.

    Each program takes SLOTS slots of one region after another. The serial chain of a slot hides behind the other
    slots' chains; the floor is the read of every byte.
    """
    n = tl.minimum(tl.load(count), capacity)
    blocks = (n + SLOTS - 1) // SLOTS
    unit = tl.program_id(0).to(tl.int64)
    while unit < blocks * regions:
        region = unit // tl.maximum(blocks, 1)
        item = (unit - region * blocks) * SLOTS + tl.arange(0, SLOTS)
        mask = item < n
        slot = tl.load(slots + item, mask=mask, other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        slot = tl.where(valid, slot, 0)
        page = slot // page_size
        row = page * page_stride + (slot - page * page_size) * slot_stride
        address = tl.load(table + 2 * region)
        fold = tl.zeros([SLOTS], dtype=tl.int64)
        total = tl.zeros([SLOTS], dtype=tl.int64)
        state = scan_start(total, SCAN)
        at = length * 0
        while at < length:
            piece = at // piece_length
            if UNIT == 4:
                base = address.to(tl.pointer_type(tl.int32)) + row
                low = tl.load(base + (piece.to(tl.int64) * piece_stride + (at - piece * piece_length)))
                piece = (at + 1) // piece_length
                high = tl.load(base + (piece.to(tl.int64) * piece_stride + (at + 1 - piece * piece_length)))
                word = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
                at += 2
            else:
                base = address.to(tl.pointer_type(tl.int64)) + row
                word = tl.load(base + (piece.to(tl.int64) * piece_stride + (at - piece * piece_length)))
                at += 1
            fold = mix(fold ^ word)
            total += word
            state = scan_step(state, word, SCAN)
        tl.store(folds + tl.load(numbers + region) * capacity + item, fold, mask=mask)
        tl.atomic_add(sums + item, total, mask=valid, sem="relaxed")
        if SCAN != NOT_SCANNED:
            found = scan_found(state, SCAN)
            tl.store(nonfinite + item, found.to(tl.uint8), mask=valid & found)
        unit += tl.num_programs(0)


@triton.jit(
    do_not_specialize=["capacity", "num_slots", "regions"],
    do_not_specialize_on_alignment=["slots", "digests", "region_bytes"],
)
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
    """total = s(total ^ fold) over the regions in attach order, for the first `count` slots; 0 for slots out of range.
    Reads 8 bytes per slot and region."""
    n = tl.minimum(tl.load(count), capacity)
    item = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    while tl.min(item, axis=0) < n:
        mask = item < n
        slot = tl.load(slots + item, mask=mask, other=-1)
        valid = (slot >= 0) & (slot < num_slots)
        total = tl.zeros([SLOTS], dtype=tl.int64)
        region = regions * 0
        while region < regions:
            fold = tl.load(folds + region * capacity + item, mask=mask, other=0)
            total = mix(total ^ fold)
            if WITH_BYTES:
                top = ((fold >> 56) & 0xFF).to(tl.uint8)
                tl.store(region_bytes + item * regions + region, top, mask=valid)
            region += 1
        tl.store(digests + item, tl.where(valid, total, 0), mask=mask)
        item += tl.num_programs(0).to(tl.int64) * SLOTS


@dataclass
class DeviceFold:
    """The fold's scratch for one layout, whose parts and region numbers it is given."""

    layout: GroupLayout
    parts: list[Part]
    _folds: torch.Tensor | None = field(default=None, init=False)
    _programs: int = field(init=False)

    def __post_init__(self) -> None:
        self._programs = programs_on(self.layout.device, _PROGRAMS_PER_SM)

    def reserve(self, capacity: int) -> None:
        """Allocates the scratch for up to `capacity` slots: 8 bytes per slot and region."""
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
        region_bytes: torch.Tensor | None,
        nonfinite: torch.Tensor | None,
    ) -> None:
        """Launches only; see `DeviceDigest.enqueue`. Raises ValueError if too little was reserved."""
        capacity = slots.numel()
        regions = len(self.layout.regions)
        if self._folds is None or self._folds.numel() < regions * capacity:
            raise ValueError(f"reserve({capacity}) was not called: a captured launch cannot allocate scratch")
        for part in self.parts:
            fold_kernel[(self._programs,)](
                slots,
                count,
                part.table,
                part.numbers,
                self._folds,
                sums,
                sums if nonfinite is None else nonfinite,
                capacity,
                self.layout.num_slots,
                self.layout.page_size,
                part.page_stride,
                part.slot_stride,
                part.piece_stride,
                part.piece_length,
                part.length,
                part.regions,
                UNIT=part.unit,
                SCAN=NOT_SCANNED.value if nonfinite is None or part.dtype is None else SCANS[part.dtype],
                SLOTS=_SLOTS,
                num_warps=1,
            )
        fold_total_kernel[(self._programs,)](
            slots,
            count,
            self._folds,
            digests,
            digests if region_bytes is None else region_bytes,
            capacity,
            self.layout.num_slots,
            regions,
            WITH_BYTES=region_bytes is not None,
            SLOTS=_SLOTS,
            num_warps=1,
        )

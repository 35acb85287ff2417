"""Digest and sum of slots in torch: the reference, and the backend of host pools.

Rows are gathered region by region into bounded scratch and mixed there in place, so that the work stays in the
cache and temporaries stay bounded whatever the number of slots. Python loops over regions and chunks, never over slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from canary_kernels.constants import CHAIN_STEP, SPLITMIX_MUL_1, SPLITMIX_MUL_2, WORD_STEP, mix, signed
from canary_kernels.layout import GroupLayout, Region
from canary_kernels.reference.mixing import mix as mix_tensor
from canary_kernels.scheme import Scheme

SCRATCH_WORDS: dict[Scheme, int] = {"native": 1 << 16, "sglang": 1 << 18}
"""8-byte words of one of the two scratch buffers (0.5 and 2 MiB): the native digest wants to stay in the cache, the
fold wants many rows per step. A single row that is longer makes them larger."""
_MOST_SLOTS = 4096
"""Most slots gathered at once, so that index vectors stay small too."""


@dataclass(frozen=True, kw_only=True)
class _View:
    """A region as a table of overlapping rows: row number = page*page_rows + offset*slot_rows + piece*piece_rows."""

    rows: torch.Tensor
    page_rows: int
    slot_rows: int
    piece_rows: int
    pieces: int
    words: int
    wide: bool

    @property
    def geometry(self) -> tuple[int, int, int, int]:
        """What decides the row numbers of a slot."""
        return (self.page_rows, self.slot_rows, self.piece_rows, self.pieces)

    @property
    def shape(self) -> tuple[int, bool, int]:
        """Regions of one shape are gathered into one batch."""
        return (self.words, self.wide, self.pieces)


def _view(layout: GroupLayout, region: Region) -> _View:
    """Regions whose pieces are whole, 8-byte aligned words are read as int64, all others as int32."""
    strides = [
        region.page_stride if layout.num_pages > 1 else 0,
        region.slot_stride if layout.page_size > 1 else 0,
        region.piece_stride if region.pieces > 1 else 0,
    ]
    wide = not any(value % 8 for value in (*strides, region.piece_bytes, region.memory.data_ptr() + region.offset))
    size, dtype = (8, torch.int64) if wide else (4, torch.int32)
    reach = (layout.num_pages - 1) * strides[0] + (layout.page_size - 1) * strides[1] + (region.pieces - 1) * strides[2]
    flat = region.memory[region.offset : region.offset + reach + region.piece_bytes].view(dtype)
    step = math.gcd(*strides) or size
    rows = flat.as_strided((reach // step + 1, region.piece_bytes // size), (step // size, 1))
    return _View(
        rows=rows,
        page_rows=strides[0] // step,
        slot_rows=strides[1] // step,
        piece_rows=strides[2] // step,
        pieces=region.pieces,
        words=region.words,
        wide=wide,
    )


@dataclass
class HostDigest:
    """Views, keys and scratch of one layout, made once and used for every digest of the group."""

    layout: GroupLayout
    _views: list[_View] = field(init=False)
    _batches: list[list[int]] = field(init=False)
    _word_keys: torch.Tensor = field(init=False)
    _region_keys: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.layout.device
        self._views = [_view(self.layout, region) for region in self.layout.regions]
        by_shape: dict[tuple[int, bool, int], list[int]] = {}
        for number, view in enumerate(self._views):
            by_shape.setdefault(view.shape, []).append(number)
        self._batches = list(by_shape.values())
        self._word_keys, self._region_keys = keys(self.layout, device)

    def __call__(
        self,
        slots: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
        scheme: Scheme,
    ) -> None:
        """Fills digests [n], sums [n] and, if given, region_bytes [n, R] (uint8) for slots [n]."""
        scratch: list[torch.Tensor] = []
        for start in range(0, slots.numel(), _MOST_SLOTS):
            end = min(start + _MOST_SLOTS, slots.numel())
            self._chunk(
                slots[start:end],
                digests=digests[start:end],
                sums=sums[start:end],
                region_bytes=None if region_bytes is None else region_bytes[start:end],
                scheme=scheme,
                scratch=scratch,
            )

    def _chunk(
        self,
        slots: torch.Tensor,
        *,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
        scheme: Scheme,
        scratch: list[torch.Tensor],
    ) -> None:
        valid = (slots >= 0) & (slots < self.layout.num_slots)
        inside = torch.where(valid, slots, 0)
        page = torch.div(inside, self.layout.page_size, rounding_mode="floor")
        offset = inside - page * self.layout.page_size
        sums.zero_()
        digests.zero_()
        count = slots.numel()
        folded = (
            torch.zeros((len(self._views), count), dtype=torch.int64, device=slots.device)
            if scheme == "sglang"
            else None
        )
        numbers: dict[tuple[int, int, int, int], torch.Tensor] = {}
        for view in self._views:
            if view.geometry not in numbers:
                numbers[view.geometry] = _row_numbers(view, page, offset)
        for batch in self._batches:
            words = self._views[batch[0]].words
            for regions, first, last in _portions(batch, count, words, SCRATCH_WORDS[scheme]):
                index = [numbers[self._views[region].geometry] for region in regions]
                x, spare = self._gather(regions, index, first, last, scratch)
                sums[first:last] += x.sum(dim=(0, 2))
                if folded is not None:
                    folded[regions, first:last] = _fold(x, spare)
                    continue
                key = self._word_keys[:words] ^ self._region_keys[regions].unsqueeze(1)
                _mix_in_place(x.bitwise_xor_(key.unsqueeze(1)), spare)
                partial = x.sum(dim=2)
                digests[first:last] += partial.sum(dim=0)
                if region_bytes is not None:
                    region_bytes[first:last, regions] = ((partial >> 56) & 0xFF).to(torch.uint8).T
        if folded is not None:
            for accumulator in folded:
                digests.copy_(mix_tensor(digests ^ accumulator))
            if region_bytes is not None:
                region_bytes.copy_(((folded >> 56) & 0xFF).to(torch.uint8).T)
        wild = ~valid
        digests[wild] = 0
        sums[wild] = 0
        if region_bytes is not None:
            region_bytes[wild] = 0

    def _gather(
        self, regions: list[int], index: list[torch.Tensor], first: int, last: int, scratch: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The words [regions, slots, words] as int64 in scratch, and a second buffer of the same shape."""
        view = self._views[regions[0]]
        count, words, pieces = last - first, view.words, view.pieces
        size = len(regions) * count * words
        if not scratch or scratch[0].numel() < size:
            scratch[:] = [torch.empty(size, dtype=torch.int64, device=view.rows.device) for _ in range(2)]
        x = scratch[0][:size].view(len(regions), count, words)
        spare = scratch[1][:size].view(len(regions), count, words)
        width = view.rows.shape[1]
        half = not view.wide and (pieces * width) % 2 == 1
        for number, region in enumerate(regions):
            rows = self._views[region].rows
            wanted = index[number][first * pieces : last * pieces]
            if view.wide:
                torch.index_select(rows, 0, wanted, out=x[number].view(count * pieces, width))
            elif not half:
                torch.index_select(rows, 0, wanted, out=x[number].view(torch.int32).view(count * pieces, width))
            else:
                narrow = spare.view(-1).view(torch.int32)[: count * pieces * width]
                torch.index_select(rows, 0, wanted, out=narrow.view(count * pieces, width))
                target = x[number].view(torch.int32).view(count, 2 * words)
                target[:, : pieces * width] = narrow.view(count, pieces * width)
                target[:, pieces * width] = 0
        return x, spare


def keys(layout: GroupLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """word_keys [W] and region_keys [R], int64: `key(r, j) = region_keys[r] ^ word_keys[j]`."""
    longest = max(region.words for region in layout.regions)
    numbers = torch.arange(1, longest + 1, dtype=torch.int64, device=device)
    words = mix_tensor(numbers * signed(WORD_STEP))
    regions = [signed(mix((number + 1) * CHAIN_STEP)) for number in range(len(layout.regions))]
    return words, torch.tensor(regions, dtype=torch.int64, device=device)


def _row_numbers(view: _View, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Row numbers [slots * pieces], pieces in order inside each slot."""
    base = page * view.page_rows + offset * view.slot_rows
    if view.pieces == 1:
        return base
    pieces = torch.arange(view.pieces, dtype=torch.int64, device=page.device) * view.piece_rows
    return (base.unsqueeze(1) + pieces).view(-1)


def _portions(batch: list[int], slots: int, words: int, capacity: int) -> Iterator[tuple[list[int], int, int]]:
    """Splits regions x slots into portions of at most `capacity` words (one row at least)."""
    fit = max(1, capacity // words)
    together = max(1, fit // slots)
    for start in range(0, len(batch), together):
        for first in range(0, slots, fit):
            yield batch[start : start + together], first, min(first + fit, slots)


def _mix_in_place(x: torch.Tensor, spare: torch.Tensor) -> None:
    """x = s(x) with one spare buffer of the same size.

    On the host by numpy over the same memory: it multiplies 64-bit integers twice as fast as torch, and shifts
    unsigned ones logically where torch needs a mask besides.
    """
    if x.device.type == "cpu":
        _mix_words(x.view(-1).numpy().view(np.uint64), spare.view(-1).numpy().view(np.uint64))
    else:
        x.copy_(mix_tensor(x))


def _mix_words(words: npt.NDArray[np.uint64], shifted: npt.NDArray[np.uint64]) -> None:
    """words = s(words); `shifted` is scratch."""
    np.right_shift(words, 30, out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.multiply(words, SPLITMIX_MUL_1, out=words)
    np.right_shift(words, 27, out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.multiply(words, SPLITMIX_MUL_2, out=words)
    np.right_shift(words, 31, out=shifted)
    np.bitwise_xor(words, shifted, out=words)


def _fold(x: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """`acc = s(acc ^ word)` along the last dimension: [regions, slots]; serial along the words,
    vectorised across slots."""
    regions, slots, words = x.shape
    columns = spare.view(words, regions * slots)
    columns.copy_(x.view(regions * slots, words).T)
    accumulator = torch.zeros(regions * slots, dtype=torch.int64, device=x.device)
    if x.device.type == "cpu":
        words_in, state = columns.numpy().view(np.uint64), accumulator.numpy().view(np.uint64)
        shifted = np.empty_like(state)
        for column in words_in:
            np.bitwise_xor(state, column, out=state)
            _mix_words(state, shifted)
    else:
        for row in columns:
            accumulator = mix_tensor(accumulator ^ row)
    return accumulator.view(regions, slots)

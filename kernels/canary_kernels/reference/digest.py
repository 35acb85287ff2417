"""Digest and sum of slots in torch: the reference, and the backend of host pools.

Rows are gathered into bounded scratch and mixed there in place, so that the work stays in the cache and temporaries
stay bounded whatever the number of slots. Regions of one geometry in one memory are gathered together, so that a call
for few slots costs few operations. Python loops over memories and portions, never over slots.
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
from canary_kernels.nonfinite import NONFINITE_RULES, NonfiniteRule
from canary_kernels.reference.mixing import mix as mix_tensor
from canary_kernels.reference.nonfinite import any_nonfinite
from canary_kernels.scheme import Scheme

SCRATCH_WORDS: dict[Scheme, int] = {"native": 1 << 16, "sglang": 1 << 18}
"""8-byte words of one of the two scratch buffers (0.5 and 2 MiB): the native digest wants to stay in the cache, the
fold wants many rows per step. A single row that is longer makes them larger."""
_MOST_SLOTS = 4096
"""Most slots gathered at once, so that index vectors stay small too."""


@dataclass(frozen=True, kw_only=True)
class _Table:
    """Regions of one geometry in one memory as a table of overlapping rows, so that one gather reads them all.

    Row number of a piece = starts[region] + page*page_rows + offset*slot_rows + piece*piece_rows.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    page_rows: int
    slot_rows: int
    piece_rows: int


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Regions of one shape, mixed together: `regions` [R] are their numbers, table after table; keys [R, 1, words]."""

    regions: torch.Tensor
    tables: tuple[_Table, ...]
    keys: torch.Tensor
    words: int
    wide: bool
    pieces: int
    rule: NonfiniteRule | None


def _strides(layout: GroupLayout, region: Region) -> tuple[int, int, int]:
    """Page, slot and piece stride in bytes, 0 where there is only one."""
    return (
        region.page_stride if layout.num_pages > 1 else 0,
        region.slot_stride if layout.page_size > 1 else 0,
        region.piece_stride if region.pieces > 1 else 0,
    )


def _is_wide(layout: GroupLayout, region: Region) -> bool:
    """Whether the pieces are whole, 8-byte aligned words: such regions are read as int64, all others as int32."""
    memory = region.memory
    places = (memory.data_ptr() + region.offset, memory.storage_offset() + region.offset)
    return not any(value % 8 for value in (*_strides(layout, region), region.piece_bytes, *places))


def _table(layout: GroupLayout, regions: list[Region]) -> _Table:
    """The table of regions that share memory, strides and pieces."""
    one = regions[0]
    strides = _strides(layout, one)
    size, dtype = (8, torch.int64) if _is_wide(layout, one) else (4, torch.int32)
    begin = min(region.offset for region in regions)
    starts = [region.offset - begin for region in regions]
    reach = (layout.num_pages - 1) * strides[0] + (layout.page_size - 1) * strides[1] + (one.pieces - 1) * strides[2]
    reach += max(starts)
    flat = one.memory[begin : begin + reach + one.piece_bytes].view(dtype)
    step = math.gcd(*strides, *starts) or size
    return _Table(
        rows=flat.as_strided((reach // step + 1, one.piece_bytes // size), (step // size, 1)),
        starts=torch.tensor(starts, dtype=torch.int64, device=one.memory.device).div_(step, rounding_mode="floor"),
        page_rows=strides[0] // step,
        slot_rows=strides[1] // step,
        piece_rows=strides[2] // step,
    )


def _batches(layout: GroupLayout) -> list[_Batch]:
    """All regions of the layout, those of one shape together."""
    shapes: dict[tuple[int, bool, int, NonfiniteRule | None], dict[tuple[int, ...], list[int]]] = {}
    for number, region in enumerate(layout.regions):
        rule = None if region.dtype is None else NONFINITE_RULES.get(region.dtype)
        shape = (region.piece_bytes, _is_wide(layout, region), region.pieces, rule)
        memory = region.memory
        place = (memory.data_ptr(), memory.numel(), *_strides(layout, region))
        shapes.setdefault(shape, {}).setdefault(place, []).append(number)
    word_keys, region_keys = keys(layout, layout.device)
    batches: list[_Batch] = []
    for (_, wide, pieces, rule), places in shapes.items():
        order = [number for numbers in places.values() for number in numbers]
        words = layout.regions[order[0]].words
        regions = torch.tensor(order, device=layout.device)
        batches.append(
            _Batch(
                regions=regions,
                tables=tuple(
                    _table(layout, [layout.regions[number] for number in numbers]) for numbers in places.values()
                ),
                keys=(region_keys[regions].unsqueeze(1) ^ word_keys[:words]).unsqueeze(1),
                words=words,
                wide=wide,
                pieces=pieces,
                rule=rule,
            )
        )
    return batches


@dataclass
class HostDigest:
    """Tables and keys of one layout, made once and used for every digest of the group. Not thread-safe."""

    layout: GroupLayout
    _batches: list[_Batch] = field(init=False)
    _scratch: list[torch.Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._batches = _batches(self.layout)

    def __call__(  # noqa: PLR0917 - inputs, outputs, scheme
        self,
        slots: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
        scheme: Scheme,
        nonfinite: torch.Tensor | None = None,
    ) -> None:
        """Fills digests [n], sums [n] and, if given, region_bytes [n, R] and nonfinite [n] (uint8) for slots [n]."""
        for start in range(0, slots.numel(), _MOST_SLOTS):
            end = min(start + _MOST_SLOTS, slots.numel())
            self._chunk(
                slots[start:end],
                digests=digests[start:end],
                sums=sums[start:end],
                region_bytes=None if region_bytes is None else region_bytes[start:end],
                scheme=scheme,
                nonfinite=None if nonfinite is None else nonfinite[start:end],
            )
        self._scratch = []  # not kept: groups would add up

    def _chunk(
        self,
        slots: torch.Tensor,
        *,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
        scheme: Scheme,
        nonfinite: torch.Tensor | None,
    ) -> None:
        valid = (slots >= 0) & (slots < self.layout.num_slots)
        inside = torch.where(valid, slots, 0)
        page = torch.div(inside, self.layout.page_size, rounding_mode="floor")
        offset = inside - page * self.layout.page_size
        sums.zero_()
        digests.zero_()
        if nonfinite is not None:
            nonfinite.zero_()
        count = slots.numel()
        folded = (
            torch.zeros((len(self.layout.regions), count), dtype=torch.int64, device=slots.device)
            if scheme == "sglang"
            else None
        )
        for batch in self._batches:
            numbers: dict[tuple[int, int, int], torch.Tensor] = {}
            for some, first, last in _portions(len(batch.regions), count, batch.words, SCRATCH_WORDS[scheme]):
                x, spare = self._gather(batch, some, page, offset, numbers, slice(first, last))
                sums[first:last] += x.sum(dim=2).sum(dim=0)
                if nonfinite is not None and batch.rule is not None:
                    nonfinite[first:last] |= any_nonfinite(x, batch.rule, spare)
                if folded is not None:
                    folded[batch.regions[some], first:last] = _fold(x, spare)
                    continue
                _mix_in_place(x.bitwise_xor_(batch.keys[some]), spare)
                partial = x.sum(dim=2)
                digests[first:last] += partial.sum(dim=0)
                if region_bytes is not None:
                    region_bytes[first:last, batch.regions[some]] = ((partial >> 56) & 0xFF).to(torch.uint8).T
        if folded is not None:
            for accumulator in folded:
                digests.copy_(mix_tensor(digests ^ accumulator))
            if region_bytes is not None:
                region_bytes.copy_(((folded >> 56) & 0xFF).to(torch.uint8).T)
        digests.masked_fill_(~valid, 0)
        sums.masked_fill_(~valid, 0)
        if region_bytes is not None:
            region_bytes[~valid] = 0
        if nonfinite is not None:
            nonfinite[~valid] = 0

    def _gather(  # noqa: PLR0917 - which rows, and what is known of them already
        self,
        batch: _Batch,
        some: slice,
        page: torch.Tensor,
        offset: torch.Tensor,
        numbers: dict[tuple[int, int, int], torch.Tensor],
        part: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The words [regions, slots, words] as int64 in scratch, and a second buffer of the same shape.

        `numbers` keeps the row numbers of the tables' geometries from one portion to the next.
        """
        count, words, pieces = part.stop - part.start, batch.words, batch.pieces
        regions = some.stop - some.start
        size = regions * count * words
        if not self._scratch or self._scratch[0].numel() < size:
            self._scratch = [torch.empty(size, dtype=torch.int64, device=page.device) for _ in range(2)]
        x = self._scratch[0][:size].view(regions, count, words)
        spare = self._scratch[1][:size].view(regions, count, words)
        width = batch.tables[0].rows.shape[1]
        half = not batch.wide and (pieces * width) % 2 == 1
        if half:
            target = spare.view(-1).view(torch.int32)[: regions * count * pieces * width]
        else:
            target = x.view(-1) if batch.wide else x.view(-1).view(torch.int32)
        by_region = target.view(regions, count * pieces, width)
        begin = 0
        for table in batch.tables:
            end = begin + table.starts.numel()
            low, high = max(some.start, begin), min(some.stop, end)
            if low < high:
                geometry = (table.page_rows, table.slot_rows, table.piece_rows)
                if geometry not in numbers:
                    numbers[geometry] = _row_numbers(table, pieces, page, offset)
                wanted = numbers[geometry][part.start * pieces : part.stop * pieces]
                if end - begin > 1:
                    wanted = (table.starts[low - begin : high - begin].unsqueeze(1) + wanted).view(-1)
                out = by_region[low - some.start : high - some.start]
                torch.index_select(table.rows, 0, wanted, out=out.view(-1, width))
            begin = end
        if half:
            rows = x.view(-1).view(torch.int32).view(regions * count, 2 * words)
            rows[:, : pieces * width] = target.view(regions * count, pieces * width)
            rows[:, pieces * width] = 0
        return x, spare


def keys(layout: GroupLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """word_keys [W] and region_keys [R], int64: `key(r, j) = region_keys[r] ^ word_keys[j]`."""
    longest = max(region.words for region in layout.regions)
    numbers = torch.arange(1, longest + 1, dtype=torch.int64, device=device)
    words = mix_tensor(numbers * signed(WORD_STEP))
    regions = [signed(mix((number + 1) * CHAIN_STEP)) for number in range(len(layout.regions))]
    return words, torch.tensor(regions, dtype=torch.int64, device=device)


def _row_numbers(table: _Table, pieces: int, page: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Row numbers [slots * pieces] of the table's first region, pieces in order inside each slot."""
    base = page * table.page_rows + offset * table.slot_rows
    if pieces == 1:
        return base
    steps = torch.arange(pieces, dtype=torch.int64, device=page.device) * table.piece_rows
    return (base.unsqueeze(1) + steps).view(-1)


def _portions(regions: int, slots: int, words: int, capacity: int) -> Iterator[tuple[slice, int, int]]:
    """Splits regions x slots into portions of at most `capacity` words (one row at least)."""
    fit = max(1, capacity // words)
    together = max(1, fit // slots)
    for start in range(0, regions, together):
        for first in range(0, slots, fit):
            yield slice(start, min(start + together, regions)), first, min(first + fit, slots)


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

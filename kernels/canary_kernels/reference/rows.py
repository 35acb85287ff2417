"""The rows of a layout as tables, so that one gather reads many slots in all regions of one geometry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from canary_kernels.layout import GroupLayout, Region
from canary_kernels.nonfinite import NONFINITE_RULES, NonfiniteRule

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_UNIT = 4
"""Bytes of a table's elements (int32): what every size and stride is a multiple of."""
_LONG_ROW_BYTES = 1 << 16
"""From this size on a gather across memories gains nothing."""


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """B regions of one geometry; `regions` [B] are their numbers in the layout.

    `rows` is a table over the memory itself, int32 [N, width], whose rows overlap. Piece p of a slot in region b is row
    `page*page_rows + offset*slot_rows + starts[b*pieces + p]`. On the host one table spans several memories: the rows
    between them are nobody's and are never asked for, since the layout proves where each region's rows are.
    """

    regions: I64
    rows: torch.Tensor
    starts: I64
    page_rows: int
    slot_rows: int
    pieces: int
    words: int
    rule: NonfiniteRule | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """Some regions of a batch for a number of slots, and where they are gathered: made once, since making the views
    takes as long as using them.

    `words` [slots, regions * words] int64 and `spare` are scratch buffers; `x`, `y` the same for numpy, flat, and
    `totals` [slots] room for a sum of each slot.
    """

    regions: I64
    words: torch.Tensor
    x: U64
    y: U64
    totals: torch.Tensor
    _rows: torch.Tensor
    _starts: I64
    _wanted: I64
    _index: torch.Tensor
    _target: torch.Tensor
    _lines: I32
    _moved: I32 | None
    _half: bool

    @classmethod
    def of(cls, batch: RowBatch, some: slice, slots: int, scratch: torch.Tensor) -> Portion:
        """The portion for the regions `some` of the batch; scratch [2, >= slots * regions * batch.words] int64."""
        regions = batch.regions[some]
        width = batch.rows.shape[1]
        size = slots * regions.size * batch.words
        x, y = (buffer[:size].numpy().view(np.uint64) for buffer in scratch)
        lines = x.view(np.int32).reshape(-1, 2 * batch.words)
        units = batch.pieces * width
        moved = None
        if units == 2 * batch.words:
            target = lines.reshape(-1, width)
        elif batch.pieces == 1:
            target = lines[:, :width]
        else:
            moved = y.view(np.int32)[: lines.shape[0] * units].reshape(-1, units)
            target = moved.reshape(-1, width)
        starts = batch.starts[some.start * batch.pieces : some.stop * batch.pieces]
        wanted = np.empty((slots, starts.size), dtype=np.int64)
        return cls(
            regions=regions,
            words=scratch[0, :size].view(slots, -1),
            x=x,
            y=y,
            totals=torch.empty(slots, dtype=torch.int64),
            _rows=batch.rows,
            _starts=starts,
            _wanted=wanted,
            _index=torch.from_numpy(wanted.reshape(-1)),
            _target=torch.from_numpy(target),
            _lines=lines,
            _moved=moved,
            _half=units != 2 * batch.words,
        )

    def gather(self, first_rows: I64) -> None:
        """Fills `words` for the slots whose `page*page_rows + offset*slot_rows` are `first_rows` [slots]; a missing
        upper half word is 0. Overwrites `y`."""
        np.add(first_rows[:, None], self._starts, self._wanted)
        if self._rows.device.type == "cpu":
            torch.index_select(self._rows, 0, self._index, out=self._target)
        else:
            self._target.copy_(self._rows.index_select(0, self._index.to(self._rows.device)))
        if self._moved is not None:
            self._lines[:, :-1] = self._moved
        if self._half:
            self._lines[:, -1] = 0


def row_batches(layout: GroupLayout) -> Iterator[RowBatch]:
    """All regions of the layout, those of one geometry (and dtype, as far as it is scanned) together."""
    alike: dict[tuple[object, object], dict[NonfiniteRule | None, list[int]]] = {}
    for number, region in enumerate(layout.regions):
        rule = None if region.dtype is None else NONFINITE_RULES.get(region.dtype)
        apart = layout.device.type != "cpu" or region.piece_bytes >= _LONG_ROW_BYTES
        place = (region.memory.data_ptr(), region.memory.numel()) if apart else None
        geometry = (region.piece_bytes, region.pieces, *_strides(layout, region))
        alike.setdefault((geometry, place), {}).setdefault(rule, []).append(number)
    for by_rule in alike.values():
        for rule, numbers in by_rule.items():
            yield _batch(layout, numbers, rule)


def _batch(layout: GroupLayout, numbers: list[int], rule: NonfiniteRule | None) -> RowBatch:
    regions = [layout.regions[number] for number in numbers]
    page_stride, slot_stride, piece_stride = _strides(layout, regions[0])
    addresses = [region.memory.data_ptr() + region.offset for region in regions]
    lowest = min(addresses)
    starts = [address - lowest + piece * piece_stride for address in addresses for piece in range(regions[0].pieces)]
    step = math.gcd(page_stride, slot_stride, *starts) or _UNIT
    reach = (layout.num_pages - 1) * page_stride + (layout.page_size - 1) * slot_stride + max(starts)
    return RowBatch(
        regions=np.array(numbers),
        rows=_table(regions[addresses.index(lowest)], reach // step + 1, step),
        starts=np.array(starts) // step,
        page_rows=page_stride // step,
        slot_rows=slot_stride // step,
        pieces=regions[0].pieces,
        words=regions[0].words,
        rule=rule,
    )


def _strides(layout: GroupLayout, region: Region) -> tuple[int, int, int]:
    """Page, slot and piece stride in bytes, 0 where there is only one."""
    return (
        region.page_stride if layout.num_pages > 1 else 0,
        region.slot_stride if layout.page_size > 1 else 0,
        region.piece_stride if region.pieces > 1 else 0,
    )


def _table(first: Region, count: int, step: int) -> torch.Tensor:
    """`count` rows of `first`'s piece size, one every `step` bytes from its first byte on."""
    width = first.piece_bytes // _UNIT
    if first.memory.device.type == "cpu":  # numpy lets a view go beyond the memory it begins in
        begin = first.memory.numpy()[first.offset : first.offset + first.piece_bytes].view(np.int32)
        return torch.from_numpy(np.lib.stride_tricks.as_strided(begin, (count, width), (step, _UNIT)))
    size = (count - 1) * step + first.piece_bytes
    return (
        first.memory[first.offset : first.offset + size]
        .view(torch.int32)
        .as_strided((count, width), (step // _UNIT, 1))
    )

"""Cuts the runs of a burst into chunks of bounded size. Pure numpy.

A chunk carries only the pages that its items use, so it never has more runs or pages than items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from canary_kernels.records import OUT_OF_RANGE_SLOT

from canaryd.watch.burst import I64, Runs


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Items [first_item, first_item + count) of some runs.

    `run_index` [k] are the runs' numbers in the whole; all have at least one item here. `continues`: the first run
    began in the chunk before. `item_offsets` [k+1] counts from 0.
    """

    first_item: int
    count: int
    run_index: I64
    continues: bool
    runs: Runs
    item_offsets: I64

    def slots_of_run(self, number: int, *, num_pages: int, page_size: int) -> I64:
        """Slots of one run's items here; `OUT_OF_RANGE_SLOT` where page or list index is out of range."""
        runs = self.runs
        offset = runs.first_offsets[number] + np.arange(runs.lengths[number], dtype=np.int64)
        pages = runs.pages[runs.page_offsets[number] : runs.page_offsets[number + 1]]
        index = offset // page_size
        inside = (offset >= 0) & (index < pages.size)
        page = np.full(offset.size, -1, dtype=np.int64)
        page[inside] = pages[index[inside]]
        inside &= (page >= 0) & (page < num_pages)
        return np.where(inside, page * page_size + offset % page_size, OUT_OF_RANGE_SLOT)


def cut(runs: Runs, *, page_size: int, capacity: int) -> Iterator[Chunk]:
    """Chunks of at most `capacity` items, in order; runs without items are left out."""
    bounds = np.zeros(runs.lengths.size + 1, dtype=np.int64)
    np.cumsum(runs.lengths, out=bounds[1:])
    total = int(bounds[-1])
    for first in range(0, total, capacity):
        yield _chunk(runs, bounds, first, min(first + capacity, total), page_size)


def _chunk(runs: Runs, bounds: I64, first: int, last: int, page_size: int) -> Chunk:
    low = int(np.searchsorted(bounds, first, side="right")) - 1
    high = int(np.searchsorted(bounds, last, side="left"))
    index = low + np.flatnonzero(runs.lengths[low:high])
    begin = np.maximum(bounds[index], first)
    end = np.minimum(bounds[index + 1], last)
    skipped = begin - bounds[index]
    lengths = end - begin
    offsets = runs.first_offsets[index] + skipped
    listed = runs.page_offsets[index + 1] - runs.page_offsets[index]
    page_low = np.clip(offsets // page_size, 0, listed)
    page_high = np.clip((offsets + lengths - 1) // page_size + 1, page_low, listed)
    counts = page_high - page_low
    page_offsets = np.zeros(index.size + 1, dtype=np.int64)
    np.cumsum(counts, out=page_offsets[1:])
    source = np.repeat(runs.page_offsets[index] + page_low - page_offsets[:-1], counts)
    item_offsets = np.zeros(index.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=item_offsets[1:])
    return Chunk(
        first_item=first,
        count=last - first,
        run_index=index,
        continues=bool(skipped[0] > 0),
        runs=Runs(
            pages=runs.pages[source + np.arange(source.size)],
            page_offsets=page_offsets,
            first_offsets=offsets - page_low * page_size,
            lengths=lengths,
            first_positions=runs.first_positions[index] + skipped,
        ),
        item_offsets=item_offsets,
    )

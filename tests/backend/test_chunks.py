"""Chunks together are the whole, and none is larger than asked."""

from __future__ import annotations

import numpy as np
import pytest
from backend_pool import column
from canary_kernels import OUT_OF_RANGE_SLOT

from canaryd.backend.chunks import cut
from canaryd.watch.burst import Runs


def slots(runs, page_size):
    """[run, slot, position] of every item; a place outside the list is slot -9."""
    rows = []
    for run, length in enumerate(runs.lengths.tolist()):
        listed = runs.pages[runs.page_offsets[run] : runs.page_offsets[run + 1]].tolist()
        for nth in range(length):
            offset = int(runs.first_offsets[run]) + nth
            place = offset // page_size
            slot = listed[place] * page_size + offset % page_size if 0 <= place < len(listed) else -9
            rows.append((run, slot, int(runs.first_positions[run]) + nth))
    return rows


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("capacity", [1, 4, 50, 10_000])
def test_chunks_are_the_whole(page_size, capacity, seed):
    random = np.random.default_rng(seed)
    for count in (0, 1, 12):
        listed = random.integers(0, 9, count)
        runs = Runs(
            pages=random.permutation(int(listed.sum())).astype(np.int64),
            page_offsets=column(0, *np.cumsum(listed)),
            first_offsets=random.integers(-1, 2 * page_size, count),
            lengths=random.integers(0, 8 * page_size, count),
            first_positions=random.integers(0, 99, count),
        )
        got = []
        for chunk in cut(runs, page_size=page_size, capacity=capacity):
            assert chunk.first_item == len(got)
            assert 0 < chunk.count <= capacity
            assert chunk.runs.items == chunk.count == chunk.item_offsets[-1]
            assert chunk.runs.pages.size <= chunk.count
            assert (chunk.runs.lengths > 0).all()
            assert chunk.continues == (bool(got) and got[-1][0] == chunk.run_index[0])
            rows = slots(chunk.runs, page_size)
            got += [(int(chunk.run_index[run]), slot, position) for run, slot, position in rows]
            last = chunk.run_index.size - 1
            tail = chunk.slots_of_run(last, num_pages=10_000, page_size=page_size)
            wanted = [OUT_OF_RANGE_SLOT if slot == -9 else slot for run, slot, _ in rows if run == last]
            assert tail.tolist() == wanted
        assert got == slots(runs, page_size)


def test_wild_pages_are_out_of_range():
    runs = Runs(
        pages=column(-1, 5, 2),
        page_offsets=column(0, 3),
        first_offsets=column(1),
        lengths=column(5),
        first_positions=column(0),
    )
    (chunk,) = cut(runs, page_size=2, capacity=100)
    wild = OUT_OF_RANGE_SLOT
    assert chunk.slots_of_run(0, num_pages=5, page_size=2).tolist() == [wild, wild, wild, 4, 5]

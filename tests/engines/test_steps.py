"""Slots of a step from what its kernels read, where the real engine cannot be had: the block table of the fast path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from canaryd.client.facts import Final, end_message
from canaryd.engines.transformers.geometry import Group
from canaryd.engines.transformers.rows import Row
from canaryd.engines.transformers.steps import Batch, StepReader

PAGE, LAYERS, PAGES = 16, 3, 40
STRIDE = 2 * PAGE * LAYERS


def group(ring: int = 0) -> Group:
    return Group(
        number=0,
        name="full_attention",
        allocator=SimpleNamespace(),
        page_size=PAGE,
        num_pages=PAGES,
        pages_per_sector=2,
        block_stride=STRIDE,
        ring=ring,
    )


def ios(**fields: Any) -> SimpleNamespace:
    tokens = 32
    defaults = {
        "compute_stream": None,
        "input_ids": torch.full((tokens,), 0x5A5A, dtype=torch.int32),
        "position_ids": torch.full((tokens,), 0x5A5A, dtype=torch.int32),
        "write_index_storage": torch.full((1, tokens), 2**60),
        "block_table": torch.full((1, 8, 4), -1, dtype=torch.int32),
        "total_seqlen_q": 0,
        "use_block_table": False,
    }
    return SimpleNamespace(**(defaults | fields))


def read(engine: SimpleNamespace, counts: list[int]) -> Any:
    rows = [Row(f"r{number}#{number}", f"r{number}", None, [[]]) for number in range(len(counts))]
    final = Final()
    StepReader([group()], engine).read(Batch.of(rows, counts)).add_to(final)
    (writes,) = end_message(1, "done", final.facts).writes
    columns = (writes.counts, writes.positions, writes.tokens, writes.slots)
    return writes.rows, *(np.frombuffer(column, dtype=np.int64).tolist() for column in columns)


def test_the_block_table_says_where_a_decode_step_writes() -> None:
    engine = ios(total_seqlen_q=3, use_block_table=True)
    engine.input_ids[:3] = torch.tensor([11, 12, 13])
    engine.position_ids[:3] = torch.tensor([0, 17, 47])
    blocks = torch.tensor([[4, -1, -1], [5, 9, -1], [6, 7, 39]])
    engine.block_table[0, :3, :3] = torch.where(blocks >= 0, blocks * 2 * LAYERS, -1)
    rows, counts, positions, tokens, slots = read(engine, [1, 1, 1])
    assert rows == ["r0#0", "r1#1", "r2#2"]
    assert (counts, positions, tokens) == ([1, 1, 1], [0, 17, 47], [11, 12, 13])
    assert slots == [4 * PAGE, 9 * PAGE + 1, 39 * PAGE + 15]


@pytest.mark.parametrize(("entry", "position"), [(-1, 3), (0, 3), (2 * LAYERS * 3, 3), (2 * LAYERS * 4, 16 * 9)])
def test_a_block_table_that_leads_elsewhere_names_nothing(entry: int, position: int) -> None:
    """Unused entries, trash pages and positions beyond the table: what is written there is no row's."""
    engine = ios(total_seqlen_q=1, use_block_table=True)
    engine.input_ids[:1], engine.position_ids[:1] = 7, position
    engine.block_table[0, 0, 0] = entry
    assert read(engine, [1]) == (["r0#0"], [0], [], [], [])


def test_write_indices_to_trash_or_between_slots_are_left_out() -> None:
    trash = 2 * STRIDE
    index = [4 * STRIDE, trash, 5 * STRIDE + 15, 5 * STRIDE + 16, PAGES * STRIDE, 6 * STRIDE + 1]
    engine = ios(total_seqlen_q=6)
    engine.write_index_storage[0, :6] = torch.tensor(index)
    engine.input_ids[:6] = torch.arange(6)
    engine.position_ids[:6] = torch.arange(6) + 10
    rows, counts, positions, tokens, slots = read(engine, [2, 3, 1])
    assert rows == ["r0#0", "r1#1", "r2#2"]
    assert (counts, positions, tokens) == ([1, 1, 1], [10, 12, 15], [0, 2, 5])
    assert slots == [4 * PAGE, 5 * PAGE + 15, 6 * PAGE + 1]


def test_a_ring_keeps_a_position_at_its_remainder() -> None:
    ring = group(ring=24)
    pages = np.array([8, 5], dtype=np.int64)
    slots = ring.slots_of_positions(pages, np.array([0, 23, 24, 40, 47], dtype=np.int64))
    assert slots.tolist() == [8 * PAGE, 5 * PAGE + 7, 8 * PAGE, 5 * PAGE, 5 * PAGE + 7]

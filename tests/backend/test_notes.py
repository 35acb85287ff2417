"""What backends say of stamps and of copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from canary_kernels import GroupLayout, Region
from canary_kernels.constants import NOTE_NONFINITE, NOTE_UNCHANGED

from canaryd.backend.pool_backend import make_backend
from canaryd.watch.burst import Burst, CopyWork, GroupWork
from tests.backend.backend_pool import Pool, Rows, column


def test_slots_whose_bytes_did_not_change_since_their_last_stamp_are_noted(scheme, place, sizes, seed):
    pool = Pool(seed, scheme, place, **sizes)
    assert [group.stamps.items.size for group in pool.stamp().groups] == [0, 0]
    slots = pool.rows[0].slots
    pool.flip(0, slots[3], 2, 40)
    pool.flip(0, slots[92], 0, 0)
    noted = pool.stamp().groups
    assert noted[0].stamps.items.tolist() == [item for item in range(93) if item not in {3, 92}]
    assert set(noted[0].stamps.bits.tolist()) == {NOTE_UNCHANGED}
    assert noted[1].stamps.items.tolist() == list(range(5))
    assert noted[0].stamps.truncated == 0


def test_notes_past_the_capacity_are_counted(place, seed):
    pool = Pool(seed, "native", place, finding_capacity=10)
    pool.stamp()
    notes = pool.stamp().groups[0].stamps
    assert (notes.items.size, notes.truncated) == (10, 83)


@pytest.mark.parametrize("value", [0x7F80, 0xFFC0])
def test_nan_and_infinity_are_noted_in_the_regions_that_declare_floats(scheme, place, seed, value):
    memory = torch.zeros(4096, dtype=torch.uint8, device=place[0])
    given = {"memory": memory, "page_stride": 32, "slot_stride": 32, "piece_bytes": 32}
    regions = (Region(offset=0, dtype="bfloat16", **given), Region(offset=2048, dtype="uint8", **given))
    layout = GroupLayout(regions=regions, num_pages=64, page_size=1)
    backend = make_backend([layout], scheme=scheme, key=1, backend=place[1])
    memory.view(torch.int16)[[16 * 5 + 3, 1024 + 16 * 6]] = value - (1 << 16) if value >> 15 else value
    rows = Rows(layout, scheme, [[4, 5, 6, 7]], [4], random=np.random.default_rng(seed))
    notes = backend.run(Burst(number=1, works=(GroupWork(group=0, stamps=rows.stamps()),))).groups[0].stamps
    assert notes.items.tolist() == [1]
    assert notes.bits.tolist() == [NOTE_NONFINITE]


def test_copies_whose_stamps_differ_are_named(scheme, place, seed):
    pool = Pool(seed, scheme, place)
    slots = pool.rows[0].slots
    layout = pool.layouts[0]
    for byte in range(32):
        for region in (0, 1):
            at = [
                layout.regions[region].offset
                + slot // 16 * layout.regions[region].page_stride
                + slot % 16 * layout.regions[region].slot_stride
                + byte
                for slot in slots[:2]
            ]
            pool.memory[at[1]] = pool.memory[at[0]]
    for byte in range(16):
        for piece in range(3):
            base = [16384 + slot // 16 * 768 + slot % 16 * 16 + piece * 256 + byte for slot in slots[:2]]
            pool.memory[base[1]] = pool.memory[base[0]]
    pool.stamp()
    copies = CopyWork(sources=column(slots[0], slots[0]), destinations=column(slots[1], slots[2]))
    found = pool.run(GroupWork(group=0, copies=copies)).groups[0].copies
    assert found.items.tolist() == [1]
    records = [pool.backend.slot_record(0, slot) for slot in (slots[0], slots[2])]
    assert [found.source_digests[0], found.digests[0]] == [record.digest for record in records]
    assert [found.source_sums[0], found.sums[0]] == [record.sum for record in records]

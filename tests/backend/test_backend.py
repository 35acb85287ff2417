"""Bursts on both backends: clean ones find nothing, every kind of fault is found at its item."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from backend_pool import Pool, column
from canary_kernels import STAMPED, KernelArgumentError

from canaryd.backend.pool_backend import make_backend
from canaryd.errors import BackendError
from canaryd.watch.burst import (
    FAIL_CHAIN,
    FAIL_POSITION,
    FAIL_RANGE,
    FAIL_TOKEN,
    UNCHECKED_PREVIOUS,
    Burst,
    CompareWork,
    GroupWork,
    LinkWork,
    Runs,
    StampWork,
)


def test_a_clean_burst_finds_nothing(scheme, place, sizes, seed):
    """Stamps come first in a burst, so links and compare of the same slots see them."""
    pool = Pool(seed, scheme, place, **sizes)
    result = pool.run(
        *(
            GroupWork(group=number, stamps=rows.stamps(), compare=rows.compare(), links=rows.links())
            for number, rows in enumerate(pool.rows)
        )
    )
    assert result.number == 7
    assert [group.group for group in result.groups] == [0, 1]
    for group in result.groups:
        assert group.compare.items.size == group.links.items.size == 0
        assert group.compare.truncated == group.links.truncated == 0
    assert result.bytes_read == 2 * (93 * 112 + 5 * 144)
    assert result.busy_seconds > 0
    limit = sizes.get("chunk_items", 1000)
    counts = [rows.tokens.size for rows in pool.rows]
    chunks = sum(-(-count // limit) for count in counts)
    # Where a piece holds stamps and compares, the kernels read both at once; not the reference.
    at_once = sum(place[1] != "reference" and 2 * count <= limit for count in counts)
    reads = 2 * chunks - at_once
    assert result.launches == {"plan": reads, "digest": reads, "write": chunks, "compare": chunks, "verify": chunks}
    assert result.pieces == (1 if not sizes else 2 * -(-93 // sizes["chunk_items"]))


def test_records_hold_what_was_stamped(scheme, place, sizes, seed):
    pool = Pool(seed, scheme, place, **sizes)
    pool.stamp()
    rows = pool.rows[0]
    positions = [*range(41), *range(5, 57)]
    for slot, token, position, before, generation in zip(
        rows.slots, rows.tokens, positions, rows.before(), rows.generations, strict=True
    ):
        record = pool.backend.slot_record(0, slot)
        assert (record.token, record.position, record.prev_hash) == (token, position, before)
        assert (record.generation, record.flags, record.prev_digest) == (generation, STAMPED, 0)
        assert record.stamped
    assert not pool.backend.slot_record(0, 0).stamped


def test_a_changed_byte_is_found_at_its_item(scheme, place, sizes, seed):
    pool = Pool(seed, scheme, place, **sizes)
    pool.stamp()
    for group, rows in enumerate(pool.rows):
        for _ in range(1 if place == ("cpu", "triton") else 4):  # the interpreter is slow
            item = int(pool.random.integers(rows.tokens.size))
            region = int(pool.random.integers(len(rows.group.regions)))
            byte = int(pool.random.integers(rows.group.regions[region].slot_bytes))
            slot = rows.slots[item]
            record = pool.backend.slot_record(group, slot)
            pool.flip(group, slot, region, byte, 0x40)
            result = pool.run(GroupWork(group=group, compare=rows.compare())).groups[0]
            assert result.links is None
            assert result.compare.items.tolist() == [item]
            assert result.compare.stored_digests.tolist() == [record.digest]
            assert result.compare.stored_sums.tolist() == [record.sum]
            assert result.compare.seen_digests[0] != record.digest
            change = pool.backend.locate(group, slot, stored_digest=record.digest, stored_sum=record.sum)
            if scheme == "native":
                assert (change.region, change.word) == (region, byte // 8)
                assert change.changed_bits == 0x40 << (8 * (byte % 8))
            else:
                assert change is None
            pool.flip(group, slot, region, byte, 0x40)


def test_broken_links_are_found_at_their_items(scheme, place, sizes, seed):
    pool = Pool(seed, scheme, place, **sizes)
    pool.stamp()
    rows = pool.rows[0]

    def seen(**changes):
        links = pool.run(GroupWork(group=0, links=rows.links(**changes))).groups[0].links
        return list(zip(links.items.tolist(), links.bits.tolist(), strict=True))

    assert seen() == []
    tokens = rows.tokens.copy()
    tokens[[0, 50, 92]] += 1
    assert seen(tokens=tokens) == [(0, FAIL_TOKEN), (50, FAIL_TOKEN), (92, FAIL_TOKEN)]
    assert seen(tokens=np.full_like(tokens, -1)) == []
    assert seen(heads=rows.seeds + column(1, 1, 0)) == [(0, FAIL_CHAIN)]
    assert seen(prev_slots=column(-1, -1, rows.slots[3])) == [(41, FAIL_CHAIN)]
    assert seen(prev_slots=column(UNCHECKED_PREVIOUS, -1, UNCHECKED_PREVIOUS), heads=rows.seeds + 1) == []
    shifted = Runs(**(vars(rows.runs) | {"first_positions": column(0, 0, 6)}))
    assert seen(runs=shifted) == [(item, FAIL_POSITION) for item in range(41, 93)]
    swapped = rows.runs.pages.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    wrong = dict(seen(runs=Runs(**(vars(rows.runs) | {"pages": swapped}))))
    assert sorted(wrong) == list(range(33))
    assert all(bits & (FAIL_POSITION | FAIL_CHAIN) for bits in wrong.values())
    wild = rows.runs.pages.copy()
    wild[1] = 12
    assert seen(runs=Runs(**(vars(rows.runs) | {"pages": wild}))) == [(item, FAIL_RANGE) for item in range(16, 32)]


def test_a_run_goes_on_from_its_previous_slot(scheme, place, seed):
    """A later part of a row, linked by the slot before it."""
    pool = Pool(seed, scheme, place, chunk_items=5)
    rows = pool.rows[1]
    pool.run(GroupWork(group=1, stamps=rows.stamps()))
    late = Runs(
        pages=column(3, 44, 20),
        page_offsets=column(0, 3),
        first_offsets=column(0),
        lengths=column(3),
        first_positions=column(2),
    )

    def seen(previous):
        work = LinkWork(runs=late, tokens=rows.tokens[2:], prev_slots=column(previous), heads=column(0))
        return pool.run(GroupWork(group=1, links=work)).groups[0].links.items.tolist()

    assert seen(9) == []
    assert seen(5) == [0]


def test_a_link_is_checked_where_the_work_was_cut(scheme, place, seed):
    """The chain breaks between the last item of one chunk and the first of the next."""
    pool = Pool(seed, scheme, place, chunk_items=2)
    rows = pool.rows[1]
    pool.run(GroupWork(group=1, stamps=rows.stamps()))
    late = Runs(
        pages=column(3, 44, 20),
        page_offsets=column(0, 3),
        first_offsets=column(0),
        lengths=column(3),
        first_positions=column(2),
    )
    broken = StampWork(runs=late, tokens=rows.tokens[2:], generations=rows.generations[2:], seeds=column(1234))
    links = pool.run(GroupWork(group=1, stamps=broken, links=rows.links())).groups[0].links
    assert links.items.tolist() == [2]
    assert links.bits.tolist() == [FAIL_CHAIN]


def test_adopted_slots_are_never_false_alarms(scheme, place, seed):
    """Stamped with unknown tokens and a made-up seed, they are judged by content and position only."""
    pool = Pool(seed, scheme, place, chunk_items=2)
    rows = pool.rows[1]
    unknown = StampWork(
        runs=rows.runs, tokens=np.full_like(rows.tokens, -1), generations=rows.generations, seeds=rows.seeds + 99
    )
    result = pool.run(GroupWork(group=1, stamps=unknown, compare=rows.compare(), links=rows.links())).groups[0]
    assert result.compare.items.size == result.links.items.size == 0


def test_stamps_restart_the_judgement(scheme, place, seed):
    """What was stamped last counts: a legal write after a fault leaves nothing to find."""
    pool = Pool(seed, scheme, place)
    rows = pool.rows[1]
    pool.run(GroupWork(group=1, stamps=rows.stamps()))
    pool.flip(1, rows.slots[3], 0, 77)
    assert pool.run(GroupWork(group=1, compare=rows.compare())).groups[0].compare.items.tolist() == [3]
    pool.run(GroupWork(group=1, stamps=rows.stamps()))
    assert pool.run(GroupWork(group=1, compare=rows.compare())).groups[0].compare.items.size == 0


def test_more_mismatches_than_the_list_holds(scheme, place, sizes, seed):
    pool = Pool(seed, scheme, place, finding_capacity=5, **sizes)
    rows = pool.rows[0]
    result = pool.run(GroupWork(group=0, compare=rows.compare(), links=rows.links())).groups[0]
    assert result.compare.items.size == 5  # none was stamped
    assert result.compare.truncated == 88
    assert result.links.items.size == result.links.truncated == 0
    pool.stamp()
    tokens = rows.tokens + 1
    result = pool.run(GroupWork(group=0, compare=rows.compare(), links=rows.links(tokens=tokens))).groups[0]
    assert result.compare.items.size == result.compare.truncated == 0
    assert result.links.items.size == 5
    assert result.links.truncated == 88


def test_one_group_may_be_named_twice(scheme, place, seed):
    pool = Pool(seed, scheme, place)
    rows = pool.rows[1]
    pool.stamp()
    pool.flip(1, rows.slots[2], 0, 0)
    one = Runs(
        pages=column(rows.slots[2]),
        page_offsets=column(0, 1),
        first_offsets=column(0),
        lengths=column(1),
        first_positions=column(2),
    )
    result = pool.run(GroupWork(group=1, compare=rows.compare()), GroupWork(group=1, compare=CompareWork(runs=one)))
    assert [group.compare.items.tolist() for group in result.groups] == [[2], [0]]


def test_nothing_to_do(scheme, place, seed):
    pool = Pool(seed, scheme, place)
    assert pool.run().groups == ()
    nothing = Runs(
        pages=column(), page_offsets=column(0), first_offsets=column(), lengths=column(), first_positions=column()
    )
    result = pool.run(GroupWork(group=0, compare=CompareWork(runs=nothing)))
    assert result.groups[0].compare.items.size == 0
    assert result.launches == {}


def test_bursts_follow_each_other(scheme, place, seed):
    pool = Pool(seed, scheme, place)
    with pytest.raises(BackendError, match="no burst was started"):
        pool.backend.poll()
    burst = Burst(number=1, works=())
    pool.backend.start(burst)
    with pytest.raises(BackendError, match="burst 1 is still running"):
        pool.backend.start(burst)
    while pool.backend.poll() is None:
        pass
    with pytest.raises(BackendError, match="no burst was started"):
        pool.backend.poll()
    pool.backend.close()
    with pytest.raises(BackendError, match="the backend is closed"):
        pool.backend.start(burst)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        subprocess.CalledProcessError(1, "gcc"),
        OSError(28, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failing_device_is_a_backend_error(error, seed, monkeypatch):
    """A launch that fails, and a kernel that cannot be built; afterwards the backend can be used or closed."""
    pool = Pool(seed, "native", ("cpu", "reference"))

    def fail(*_args, **_kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("canaryd.backend.reference_backend.launch_digest", fail)
        with pytest.raises(BackendError, match=f"{type(error).__name__}: .*"):
            pool.stamp()
    pool.stamp()
    assert pool.run(GroupWork(group=0, compare=pool.rows[0].compare())).groups[0].compare.items.size == 0


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_failed_device_is_closed_all_the_same(backend, seed, monkeypatch):
    """Nothing keeps the pool's memory, which is unmapped next."""
    pool = Pool(seed, "native", ("cpu", backend))
    pool.stamp()

    def fail():
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(pool.backend, "_wait", fail)
    memory = weakref.ref(pool.memory)
    with pytest.raises(BackendError, match="unspecified launch failure"):
        pool.backend.close()
    backend = pool.backend
    del pool
    gc.collect()
    assert memory() is None
    with pytest.raises(BackendError, match="the backend is closed"):
        backend.start(Burst(number=1, works=()))


def test_a_burst_that_can_never_be_done_does_not_stay(seed, monkeypatch):
    pool = Pool(seed, "native", ("cpu", "triton"))
    burst = Burst(number=1, works=(GroupWork(group=1, stamps=pool.rows[1].stamps()),))
    pool.backend.start(burst)

    def failed():
        raise RuntimeError("CUDA error: unspecified launch failure")

    with monkeypatch.context() as patch:
        patch.setattr(pool.backend, "_done", failed)
        with pytest.raises(BackendError, match="unspecified launch failure"):
            pool.backend.poll()
    with pytest.raises(BackendError, match="no burst was started"):
        pool.backend.poll()
    pool.backend.run(burst)


def test_the_pools_memory_is_never_written(scheme, place, seed):
    pool = Pool(seed, scheme, place)
    before = pool.memory.clone()
    pool.stamp()
    pool.run(*(GroupWork(group=n, compare=r.compare(), links=r.links()) for n, r in enumerate(pool.rows)))
    assert torch.equal(pool.memory, before)


def test_slots_outside_the_group_have_no_record(scheme, seed):
    pool = Pool(seed, scheme, ("cpu", "reference"))
    for slot in (-1, 192):
        with pytest.raises(IndexError, match=f"group 0 has no slot {slot}"):
            pool.backend.slot_record(0, slot)


def test_layouts_that_the_scheme_cannot_read(seed):
    pool = Pool(seed, "native", ("cpu", "reference"))
    region = pool.layouts[1].regions[0]
    odd = type(region)(**(vars(region) | {"piece_bytes": 132}))
    group = type(pool.layouts[1])(regions=(odd,), num_pages=50, page_size=1)
    make_backend([group], scheme="native", key=0)
    with pytest.raises(KernelArgumentError, match="multiple of 16 bytes"):
        make_backend([group], scheme="sglang", key=0)
    with pytest.raises(ValueError, match="at least one layout"):
        make_backend([], scheme="native", key=0)


def test_a_host_pool_never_loads_triton():
    program = (
        "import sys; sys.path.insert(0, 'tests/backend')\n"
        "from backend_pool import Pool\n"
        "Pool(1, 'native', ('cpu', None)).stamp()\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

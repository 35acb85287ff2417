"""The kernels' backend against the reference's, on random bursts: same records, same findings, whatever is cut."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from backend_pool import SECRET, Pool, column

from canaryd.backend.pool_backend import make_backend
from canaryd.watch.burst import Burst, CompareWork, GroupWork, LinkWork, Runs, StampWork

PLACES = [
    ("cpu", "triton"),
    pytest.param(("cuda", None), marks=pytest.mark.gpu),
]


def random_runs(random, layout, *, total, wild, distinct):
    """Runs of random lengths, some empty, some with pages that do not exist; distinct: no slot twice."""
    page_size = layout.page_size
    free = random.permutation(layout.num_pages).tolist()
    pages, firsts, lengths = [], [], []
    while sum(lengths) < total and free:
        first = int(random.integers(page_size))
        length = int(random.integers(0, min(total - sum(lengths), 3 * page_size) + 1))
        count = -(-(first + length) // page_size) if length else int(random.integers(2))
        if distinct:
            listed, free = free[:count], free[count:]
            length = min(length, len(listed) * page_size - first) if listed else 0
        else:
            listed = random.integers(0, layout.num_pages, count).tolist()
        if wild and listed and random.random() < 0.3:
            listed[int(random.integers(len(listed)))] = int(random.choice([-1, layout.num_pages, 1 << 40]))
        pages.append(listed)
        firsts.append(first)
        lengths.append(max(0, length))
    return Runs(
        pages=column(*(page for listed in pages for page in listed)),
        page_offsets=column(0, *np.cumsum([len(listed) for listed in pages])),
        first_offsets=column(*firsts),
        lengths=column(*lengths),
        first_positions=random.integers(-1, 200, len(lengths)),
    )


def random_work(random, group, layout, total):
    def size():
        return int(random.integers(0, total + 1))

    stamps = links = compare = None
    if random.random() < 0.7:
        runs = random_runs(random, layout, total=size(), wild=random.random() < 0.3, distinct=True)
        stamps = StampWork(
            runs=runs,
            tokens=random.integers(-1, 9, runs.items),
            generations=random.integers(0, 1 << 62, runs.items),
            seeds=random.integers(-(1 << 63), (1 << 63) - 1, runs.lengths.size),
        )
    if random.random() < 0.7:
        runs = random_runs(random, layout, total=size(), wild=random.random() < 0.3, distinct=False)
        links = LinkWork(
            runs=runs,
            tokens=random.integers(-1, 9, runs.items),
            prev_slots=random.integers(-2, layout.num_slots + 2, runs.lengths.size),
            heads=random.integers(-(1 << 63), (1 << 63) - 1, runs.lengths.size),
        )
    if random.random() < 0.7:
        compare = CompareWork(
            runs=random_runs(random, layout, total=size(), wild=random.random() < 0.3, distinct=False)
        )
    return GroupWork(group=group, stamps=stamps, links=links, compare=compare)


def rows(result):
    """A result as plain lists."""
    listed = []
    for group in result.groups:
        for found in (group.compare, group.links):
            listed.append(
                None if found is None else {name: np.asarray(value).tolist() for name, value in vars(found).items()}
            )
    return listed


class Twins:
    """One pool's backend and a reference on the same bytes."""

    def __init__(self, seed, scheme, place, **sizes):
        self.pool = Pool(seed, scheme, place, **sizes)
        self.random = self.pool.random
        memory = self.pool.memory.cpu()
        layouts = [
            type(layout)(
                regions=tuple(type(region)(**(vars(region) | {"memory": memory})) for region in layout.regions),
                num_pages=layout.num_pages,
                page_size=layout.page_size,
            )
            for layout in self.pool.layouts
        ]
        self.reference = make_backend(layouts, scheme=scheme, key=SECRET, backend="reference")
        self.memory = memory

    def poison(self):
        """What the scratch and the result lists hold must not matter."""
        for group in self.pool.backend._groups:
            for tensor in (*vars(group._scratch.items).values(), group._scratch.read):
                tensor.fill_(-0x0101_0101_0101_0102)
            group._compares.rows.fill_(-77)
            group._broken.rows.fill_(-77)

    def burst(self, number, total, groups=(0, 1)):
        works = tuple(random_work(self.random, group, self.pool.layouts[group], total) for group in groups)
        burst = Burst(number=number, works=works)
        self.poison()
        seen, wanted = self.pool.backend.run(burst), self.reference.run(burst)
        assert rows(seen) == rows(wanted)
        assert seen.bytes_read == wanted.bytes_read
        for own, expected in zip(self.pool.backend._records, self.reference._records, strict=True):
            assert torch.equal(own.cpu(), expected)
        return seen

    def damage(self):
        at = int(self.random.integers(self.memory.numel()))
        self.memory[at] ^= 4
        self.pool.memory[at] ^= 4


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [None, 23])
def test_random_bursts_agree_with_the_reference(scheme, place, chunk, seed):
    twins = Twins(seed, scheme, place, chunk_items=chunk)
    bursts = 60 if place[0] == "cuda" else 4
    found = 0
    for number in range(bursts):
        result = twins.burst(number, 90)
        found += sum(group.compare.items.size for group in result.groups if group.compare is not None)
        twins.damage()
    assert found > 0


@pytest.mark.parametrize("place", PLACES)
def test_pieces_end_at_capacities(place, seed):
    """Works just within a piece and one item above it."""
    capacity = 12
    for items in (capacity - 1, capacity, capacity + 1):
        twins = Twins(seed, "native", place, chunk_items=capacity)
        pages = np.arange(items, dtype=np.int64)
        runs = Runs(
            pages=pages,
            page_offsets=np.arange(items + 1, dtype=np.int64),
            first_offsets=np.zeros(items, dtype=np.int64),
            lengths=np.ones(items, dtype=np.int64),
            first_positions=pages,
        )
        stamps = StampWork(runs=runs, tokens=pages, generations=pages, seeds=pages)
        links = LinkWork(runs=runs, tokens=pages, prev_slots=pages * 0 - 2, heads=pages)
        for work, pieces in (
            (GroupWork(group=1, stamps=stamps), 1),
            (GroupWork(group=1, links=links), 1),
            (GroupWork(group=1, compare=CompareWork(runs=runs)), 1),
            (GroupWork(group=1, stamps=stamps, links=links, compare=CompareWork(runs=runs)), 2),
        ):
            burst = Burst(number=1, works=(work,))
            seen, wanted = twins.pool.backend.run(burst), twins.reference.run(burst)
            assert rows(seen) == rows(wanted)
            assert seen.pieces == (pieces if items <= capacity else 2 if pieces == 1 else 4)
            assert sum(len(found["items"]) for found in rows(seen) if found) == 0


@pytest.mark.parametrize("place", PLACES)
def test_an_empty_piece_does_nothing(scheme, place, seed):
    """All kernels run, with all sizes 0."""
    twins = Twins(seed, scheme, place)
    twins.burst(1, 90)
    backend = twins.pool.backend
    before = [records.clone() for records in backend._records]
    backend._pack(())
    backend._enqueue(0, backend._groups)
    if place[0] == "cuda":
        torch.cuda.synchronize()
    assert all(torch.equal(own, kept) for own, kept in zip(backend._records, before, strict=True))
    assert backend._found.tolist() == [0] * backend._found.numel()


@pytest.mark.gpu
def test_a_burst_is_one_graph_launch_and_never_compiles(scheme, seed):
    """50 bursts of different sizes: one graph launch per piece, no kernel launched beside it, nothing compiled."""
    import triton
    from torch.profiler import ProfilerActivity, profile

    twins = Twins(seed, scheme, ("cuda", None))
    twins.burst(0, 90)
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **arguments: compiled.append(arguments)
    try:
        bursts = []
        for number in range(50):
            works = tuple(
                random_work(twins.random, group, twins.pool.layouts[group], 1 + 3 * number) for group in (0, 1)
            )
            bursts.append(Burst(number=number, works=works))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            pieces = sum(twins.pool.backend.run(burst).pieces for burst in bursts)
            torch.cuda.synchronize()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    calls = {event.key: event.count for event in profiler.key_averages()}
    launches = {name: count for name, count in calls.items() if re.match("cu.*(Launch|Memcpy|Memset)", name)}
    assert sum(launches.values()) == pieces, launches
    assert all("GraphLaunch" in name for name in launches), launches
    assert compiled == []


@pytest.mark.gpu
def test_the_graph_outlives_neither_close_nor_a_second_pool(seed):
    """Two pools on one stream; one is closed while the other's burst is in flight."""
    first, second = (Twins(seed + number, "native", ("cuda", None)) for number in range(2))
    for number in range(5):
        first.burst(number, 90)
    work = GroupWork(group=1, stamps=second.pool.rows[1].stamps())
    second.pool.backend.start(Burst(number=1, works=(work,)))
    first.pool.backend.close()
    while second.pool.backend.poll() is None:
        pass
    result = second.pool.run(GroupWork(group=1, compare=second.pool.rows[1].compare()))
    assert result.groups[0].compare.items.size == 0


FAULT = """
import numpy as np, torch
from canary_kernels import GroupLayout, Region
from canaryd.backend.pool_backend import make_backend
from canaryd.errors import BackendError
from canaryd.watch.burst import Burst, CompareWork, GroupWork, Runs

memory = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
region = Region(memory=memory, offset=0, page_stride=1 << 20, slot_stride=1 << 16, piece_bytes=1 << 16)
layout = GroupLayout(regions=(region,), num_pages=32, page_size=16)
backend = make_backend([layout], scheme="native", key=0)
numbers = np.arange(33, dtype=np.int64)
runs = Runs(
    pages=numbers[:32],
    page_offsets=numbers,
    first_offsets=numbers[:32] * 0,
    lengths=numbers[:32] * 0 + 16,
    first_positions=numbers[:32],
)
burst = Burst(number=1, works=(GroupWork(group=0, compare=CompareWork(runs=runs)),))
assert backend.run(burst).groups[0].compare.items.size == 512
memory.untyped_storage().resize_(0)
torch.cuda.empty_cache()  # the pages are gone, as after an engine's death and an unmapping
for call in (lambda: backend.run(burst), backend.close, lambda: make_backend([layout], scheme="native", key=0)):
    try:
        call()
    except BackendError as error:
        print(error)
"""


@pytest.mark.gpu
def test_a_fault_inside_the_graph_is_a_backend_error():
    """In a process of its own: the fault ends its context."""
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "illegal memory access" in line]
    assert len(lines) == 3, done.stdout

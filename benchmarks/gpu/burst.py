"""One burst of the daemon: stamps, links, second reads and 2 GiB of content, through the worker's own backend."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from canary_kernels.chain import chain_head

from benchmarks.gpu.geometry import Layout
from benchmarks.gpu.native import NO_PREVIOUS, SECRET
from benchmarks.gpu.timing import Times, summary
from benchmarks.gpu.workload import Backend, Place
from canaryd.backend.pool_backend import make_backend
from canaryd.watch.burst import I64, Burst, BurstResult, CompareWork, GroupWork, LinkWork, Runs, StampWork

GOAL_HOST_US = 60.0
GOAL_GAP_US = 5.0
FLOOR_US = 450.0
"""2 GiB at the read ceiling."""
_REPEATS = 40


@dataclass(frozen=True, kw_only=True)
class BurstShape:
    """Slots of each part: `rows` rows of `row_length` slots are live, and `content` slots are read besides
    `second_reads`."""

    rows: int
    row_length: int
    stamps: int
    second_reads: int
    content: int

    @property
    def live(self) -> int:
        """Slots of the live rows."""
        return self.rows * self.row_length


FULL = BurstShape(rows=24, row_length=4096, stamps=256, second_reads=64, content=16_384)
SMALL = BurstShape(rows=3, row_length=21, stamps=5, second_reads=2, content=30)


@dataclass(frozen=True, kw_only=True)
class BurstTimes:
    """What one burst costs. `gap_us`: the longest pause between two of its kernels or copies; `graph_launches` and
    `kernel_launches`: calls of the driver by the host. All three of one profiled burst."""

    gpu: Times
    host: Times
    bytes_read: int
    graph_launches: int
    kernel_launches: int
    gap_us: float


class BurstBench:
    """Live rows that were stamped, and the burst that follows a decode step."""

    def __init__(self, place: Place, *, layout: Layout, shape: BurstShape, backend: Backend | None) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(place.seed)
        group = layout(place, 1)
        self._page_size = group.page_size
        row_pages = -(-shape.row_length // self._page_size)
        group = layout(place, (shape.rows * row_pages + shape.stamps) * self._page_size)
        order = self._rng.permutation(group.num_pages).astype(np.int64)
        self._live_pages = order[: shape.rows * row_pages].reshape(shape.rows, row_pages)
        self._new_pages = order[shape.rows * row_pages :][: shape.stamps]
        self._tokens = self._rng.integers(0, 1 << 17, shape.live, dtype=np.int64)
        self._heads = np.full(shape.rows, chain_head("native"), dtype=np.int64)
        self.backend = make_backend([group], scheme="native", key=SECRET, backend=backend)
        self._number = 0
        self.stamped = self.run(self._whole_rows())

    def run(self, work: GroupWork) -> BurstResult:
        """Runs one burst and waits for it."""
        return self.backend.run(self._burst(work))

    def _burst(self, work: GroupWork) -> Burst:
        self._number += 1
        return Burst(number=self._number, works=(work,))

    def _live_runs(self) -> Runs:
        rows, length = self._shape.rows, self._shape.row_length
        return self._runs(self._live_pages, np.full(rows, length, dtype=np.int64), np.zeros(rows, dtype=np.int64))

    def _runs(self, pages: I64, lengths: I64, positions: I64) -> Runs:
        """Runs over equally many pages each, [k, P]."""
        k, each = pages.shape
        return Runs(
            pages=np.ascontiguousarray(pages.reshape(-1)),
            page_offsets=np.arange(k + 1, dtype=np.int64) * each,
            first_offsets=np.zeros(k, dtype=np.int64),
            lengths=lengths,
            first_positions=positions,
        )

    def _whole_rows(self) -> GroupWork:
        zeros = np.zeros(self._shape.live, dtype=np.int64)
        return GroupWork(
            group=0,
            stamps=StampWork(runs=self._live_runs(), tokens=self._tokens, generations=zeros, seeds=self._heads),
        )

    def work(self) -> GroupWork:
        """A tick's work: stamps of a decode step, links of all live rows, second reads and content of live pages."""
        shape = self._shape
        ones = np.ones(shape.stamps, dtype=np.int64)
        stamps = StampWork(
            runs=self._runs(self._new_pages[:, None], ones, ones * 100),
            tokens=self._rng.integers(0, 1 << 17, shape.stamps, dtype=np.int64),
            generations=ones,
            seeds=self._rng.integers(0, 1 << 62, shape.stamps, dtype=np.int64),
        )
        pages = self._rng.permutation(self._live_pages[:, : shape.row_length // self._page_size].reshape(-1))
        whole = shape.content // self._page_size
        # a second read is a run of one slot, content comes as whole pages
        lengths = np.concatenate((np.ones(shape.second_reads), np.full(whole, self._page_size))).astype(np.int64)
        read = np.concatenate((pages[: shape.second_reads], pages[-whole:]))[:, None]
        links = LinkWork(
            runs=self._live_runs(),
            tokens=self._tokens,
            prev_slots=np.full(shape.rows, NO_PREVIOUS, dtype=np.int64),
            heads=self._heads,
        )
        compare = CompareWork(runs=self._runs(read, lengths, np.zeros_like(lengths)))
        return GroupWork(group=0, stamps=stamps, links=links, compare=compare)

    def records(self) -> list[object]:
        """Records of all slots of the small shape."""
        slots = [int(page) * self._page_size + at for page in self._live_pages.reshape(-1) for at in range(3)]
        slots += [int(page) * self._page_size for page in self._new_pages]
        return [self.backend.slot_record(0, slot) for slot in slots]

    def measure(self) -> BurstTimes:
        """Times of bursts that differ in content, one after the other."""
        works = [self.work() for _ in range(4)]
        for work in works:
            self.run(work)
        gpu, host, bytes_read = [], [], 0
        for repeat in range(_REPEATS):
            burst = self._burst(works[repeat % len(works)])
            began = time.perf_counter()
            self.backend.start(burst)
            host.append((time.perf_counter() - began) * 1e6)
            while (result := self.backend.poll()) is None:
                time.sleep(0.0001)
            gpu.append(result.busy_seconds * 1e6)
            bytes_read = result.bytes_read
            if any(part.compare and part.compare.items.size for part in result.groups):
                raise RuntimeError("the burst found mismatches in content that nobody changed")
        graphs, kernels, gap = self._profile(works[0])
        return BurstTimes(
            gpu=summary(gpu, launches_per_replay=1),
            host=summary(host, launches_per_replay=1),
            bytes_read=bytes_read,
            graph_launches=graphs,
            kernel_launches=kernels,
            gap_us=gap,
        )

    def _profile(self, work: GroupWork) -> tuple[int, int, float]:
        """Graph launches, other launches of the host, and the longest pause on the device, of one burst."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            self.run(work)
            torch.cuda.synchronize()
        events = trace.events()
        names = [event.name for event in events if event.device_type.name == "CPU"]
        graphs = sum(name.startswith("cudaGraphLaunch") or name.startswith("cuGraphLaunch") for name in names)
        kernels = sum("LaunchKernel" in name or "Memcpy" in name or "Memset" in name for name in names)
        spans = sorted(
            (event.time_range.start, event.time_range.end) for event in events if event.device_type.name == "CUDA"
        )
        gap, end = 0.0, spans[0][1] if spans else 0.0
        for first, last in spans:
            gap = max(gap, first - end)
            end = max(end, last)
        return graphs, kernels, float(gap)


def burst_difference(place: Place, *, layout: Layout) -> str:
    """What differs between a small burst on the kernels and on the reference; empty if nothing does."""
    sides = [BurstBench(place, layout=layout, shape=SMALL, backend=backend) for backend in ("triton", "reference")]
    outcomes = []
    for side in sides:
        result = side.run(side.work())
        compare, links = result.groups[0].compare, result.groups[0].links
        assert compare is not None  # noqa: S101 - both were asked for
        assert links is not None  # noqa: S101
        columns = [*vars(compare).values(), *vars(links).values()]
        lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
        outcomes.append((lists, side.records()))
        side.backend.close()
    if outcomes[0][0] != outcomes[1][0]:
        return f"findings {outcomes[0][0]}, not {outcomes[1][0]}"
    wrong = sum(one != other for one, other in zip(outcomes[0][1], outcomes[1][1], strict=True))
    return f"{wrong} records differ" if wrong else ""

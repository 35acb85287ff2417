"""The daemon's own small work: stamps of a prefill and of a decode step, and the links of live rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from canary_kernels import (
    LINK_FIELDS,
    Findings,
    GroupLayout,
    ItemRuns,
    Items,
    allocate_records,
    chain_head,
    launch_links,
    launch_plan_items,
    launch_stamp,
)
from canary_kernels.device.items import enqueue_items
from canary_kernels.device.links import enqueue_links
from canary_kernels.device.stamp import enqueue_stamp

from benchmarks.gpu.content import FINDING_CAPACITY, Digests
from benchmarks.gpu.geometry import Layout, sector_bytes
from benchmarks.gpu.workload import Backend, Place, Workload, sorted_rows

SECRET = 0x1234_5678_9ABC_DEF0
SETS = 4
RECORD_BYTES = 64
NO_PREVIOUS = -1


def runs_of(
    place: Place, *, lengths: list[int], page_size: int, pages: torch.Tensor, prev_slots: int = NO_PREVIOUS
) -> ItemRuns:
    """Runs from position 0 on over the pages in turn, each beginning on a page of its own."""
    page_counts = torch.tensor([0] + [-(-length // page_size) for length in lengths])
    items = torch.tensor([0, *lengths])
    k = len(lengths)
    return ItemRuns(
        pages=pages,
        page_offsets=page_counts.cumsum(0).to(place.device),
        first_offsets=place.vector([0] * k),
        item_offsets=items.cumsum(0).to(place.device),
        first_positions=place.vector([0] * k),
        first_prev_slots=place.vector([prev_slots] * k),
    )


class _StampSet:
    """Runs of one set, and what a stamp of them needs."""

    def __init__(self, place: Place, layout: GroupLayout, lengths: list[int], pages: torch.Tensor) -> None:
        n, k = sum(lengths), len(lengths)
        generator = place.generator()
        self.runs = runs_of(place, lengths=lengths, page_size=layout.page_size, pages=pages)
        self.seeds = torch.full((k,), chain_head("native"), dtype=torch.int64, device=place.device)
        self.tokens = torch.randint(0, 1 << 17, (n,), generator=generator, device=place.device)
        self.generations = torch.arange(n, device=place.device)
        self.items = Items(**{name: place.poisoned(n) for name in Items.__annotations__})
        self.run_count, self.item_count = place.vector([k]), place.vector([n])
        self.out = Digests(place, layout, n)


class StampPass:
    """Plan, digest and stamp of one engine step; each set has slots of its own, so that none is read from the L2."""

    def __init__(self, place: Place, *, layout: Layout, lengths: list[int], sets: int = SETS) -> None:
        self.sets = sets
        page_size = layout(place, 1).page_size
        pages_per_set = sum(-(-length // page_size) for length in lengths)
        self._layout = layout(place, sets * pages_per_set * page_size)
        order = torch.randperm(self._layout.num_pages, generator=place.generator(), device=place.device)
        self._records = allocate_records(self._layout.num_slots, place.device)
        self._sets = [
            _StampSet(place, self._layout, lengths, order[number * pages_per_set :][:pages_per_set].contiguous())
            for number in range(sets)
        ]
        first = self._sets[0].runs.pages * page_size
        self.bytes_moved = sum(lengths) * (sector_bytes(self._layout, first[:1]) + RECORD_BYTES)

    def launch(self, number: int, backend: Backend) -> None:
        """See `Workload`."""
        own, layout = self._sets[number], self._layout
        if backend == "triton":
            enqueue_items(
                own.runs,
                own.items,
                run_count=own.run_count,
                item_count=own.item_count,
                num_pages=layout.num_pages,
                page_size=layout.page_size,
            )
            own.out.launch(own.items.slots, own.item_count, backend)
            enqueue_stamp(
                self._records,
                own.items,
                own.runs.item_offsets,
                own.seeds,
                own.tokens,
                own.generations,
                own.out.digests,
                own.out.sums,
                run_count=own.run_count,
                item_count=own.item_count,
                scheme="native",
                key=SECRET,
            )
            return
        launch_plan_items(
            runs=own.runs, out=own.items, num_pages=layout.num_pages, page_size=layout.page_size, backend=backend
        )
        own.out.launch(own.items.slots, own.item_count, backend)
        launch_stamp(
            records=self._records,
            slots=own.items.slots,
            positions=own.items.positions,
            item_offsets=own.runs.item_offsets,
            seeds=own.seeds,
            tokens=own.tokens,
            generations=own.generations,
            digests=own.out.digests,
            sums=own.out.sums,
            key=SECRET,
            backend=backend,
        )

    def results(self, number: int) -> list[torch.Tensor]:
        """See `Workload`."""
        return [self._records]


class LinksPass:
    """The links of `size` live slots in rows of `row_length`, all of them right; no content is read.

    Floor: the first 32 bytes of each record, once; tokens, positions and slots follow from runs and page lists.
    """

    def __init__(self, place: Place, size: int, *, row_length: int, page_size: int, sets: int = SETS) -> None:
        self.sets = sets
        lengths = [row_length] * (size // row_length) + ([size % row_length] if size % row_length else [])
        self._page_size = page_size
        self._num_pages = sum(-(-length // page_size) for length in lengths)
        generator = place.generator()
        self._heads = torch.full((len(lengths),), chain_head("native"), dtype=torch.int64, device=place.device)
        self._tokens = torch.randint(0, 1 << 17, (size,), generator=generator, device=place.device)
        self._run_count, self._item_count = place.vector([len(lengths)]), place.vector([size])
        self._runs, self._records, self._out = [], [], []
        for _ in range(sets):
            pages = torch.randperm(self._num_pages, generator=generator, device=place.device)
            runs = runs_of(place, lengths=lengths, page_size=page_size, pages=pages)
            self._runs.append(runs)
            self._records.append(self._stamped(place, runs))
            self._out.append(Findings.allocate(capacity=FINDING_CAPACITY, width=LINK_FIELDS, device=place.device))
        self._records[0][3, 1] += 1  # something to find
        self.bytes_moved = size * (32 + 8) + self._num_pages * 8

    def _stamped(self, place: Place, runs: ItemRuns) -> torch.Tensor:
        records = allocate_records(self._num_pages * self._page_size, place.device)
        items = Items.allocate(self._tokens.numel(), place.device)
        launch_plan_items(
            runs=runs, out=items, num_pages=self._num_pages, page_size=self._page_size, backend="reference"
        )
        zeros = torch.zeros_like(self._tokens)
        launch_stamp(
            records=records,
            slots=items.slots,
            positions=items.positions,
            item_offsets=runs.item_offsets,
            seeds=self._heads,
            tokens=self._tokens,
            generations=zeros,
            digests=zeros,
            sums=zeros,
            key=SECRET,
            backend="reference" if place.device.type == "cpu" else "triton",
        )
        return records

    def launch(self, number: int, backend: Backend) -> None:
        """See `Workload`."""
        out, runs, records = self._out[number], self._runs[number], self._records[number]
        out.reset()
        if backend == "triton":
            enqueue_links(
                records=records,
                runs=runs,
                run_count=self._run_count,
                item_count=self._item_count,
                tokens=self._tokens,
                heads=self._heads,
                out=out,
                page_size=self._page_size,
                key=SECRET,
            )
        else:
            launch_links(
                records=records,
                runs=runs,
                tokens=self._tokens,
                heads=self._heads,
                out=out,
                page_size=self._page_size,
                key=SECRET,
                backend=backend,
            )

    def results(self, number: int) -> list[torch.Tensor]:
        """See `Workload`."""
        return sorted_rows(self._out[number].rows, self._out[number].count)


def stamp_prefill(layout: Layout) -> Callable[[Place, int], Workload]:
    """One run of `size` tokens."""
    return lambda place, size: StampPass(place, layout=layout, lengths=[size])


def stamp_decode(layout: Layout) -> Callable[[Place, int], Workload]:
    """`size` runs of one token each."""
    return lambda place, size: StampPass(place, layout=layout, lengths=[1] * size)


def links_pass(*, row_length: int, page_size: int) -> Callable[[Place, int], Workload]:
    """Rows of `row_length` slots."""
    return lambda place, size: LinksPass(place, size, row_length=row_length, page_size=page_size)

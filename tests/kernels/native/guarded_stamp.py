"""Expand, stamp and compare items on tensors between protected pages; a program for `test_native_bounds.py`.

Usage: `guarded_stamp.py BACKEND SEED [beyond]`. One access outside any tensor ends the process with SIGSEGV. `beyond`
passes too short a tensor, to show that it would.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from canary_kernels import (
    COMPARE_FIELDS,
    Findings,
    ItemRuns,
    Items,
    allocate_records,
    launch_compare,
    launch_plan_items,
    launch_stamp,
)
from guarded_links import fenced_rounds, wild
from test_links import draw_table

from tests.kernels.contract.cases import HUGE

CPU = torch.device("cpu")


class Batch:
    """Runs, their items and records, all fenced; with kernels, runs and counts say anything."""

    def __init__(self, fence, rng, backend):
        self._fence, self._rng, self.backend = fence, rng, backend
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        self.page_size, self.num_pages = rng.choice((1, 3, 16)), rng.randrange(1, 20)
        table = draw_table(generator, page_size=self.page_size, num_pages=self.num_pages, runs=rng.choice((1, 5, 40)))
        plain = vars(table.runs("cpu"))
        if backend == "triton":  # the reference does not define the owners of offsets that nobody sorted
            plain = {name: wild(rng, tensor) for name, tensor in plain.items()}
        self.runs = ItemRuns(**{name: fence.place(tensor) for name, tensor in plain.items()})
        self.n = len(table.tokens)
        self.items = Items(**{name: self.column() for name in Items.__annotations__})
        self.records = fence.place(allocate_records(self.num_pages * self.page_size, CPU))
        self.columns = {name: self.column() for name in ("tokens", "generations", "digests", "sums")}
        self.seeds = fence.place(torch.zeros(len(table.heads), dtype=torch.int64))

    def column(self):
        return self._fence.memory(self.n * 8).view(torch.int64)

    def count(self):
        return self._fence.place(torch.tensor([self._rng.choice((self._rng.randrange(50), *HUGE))]))

    def scramble(self):
        """Slots, positions and owners that no plan ever made."""
        for column in vars(self.items).values():
            column.copy_(wild(self._rng, column))


def run(fence, rng, backend):
    batch = Batch(fence, rng, backend)
    launch_plan_items(
        runs=batch.runs, out=batch.items, num_pages=batch.num_pages, page_size=batch.page_size, backend=backend
    )
    if backend == "triton":
        batch.scramble()
    scheme = rng.choice(("native", "sglang"))
    launch_stamp(
        records=batch.records,
        slots=batch.items.slots,
        positions=batch.items.positions,
        item_offsets=batch.runs.item_offsets,
        seeds=batch.seeds,
        **batch.columns,
        scheme=scheme,
        backend=backend,
    )
    rows = rng.choice((0, 3, 1000))
    out = Findings(
        rows=fence.memory(rows * COMPARE_FIELDS * 8).view(torch.int64).reshape(rows, COMPARE_FIELDS),
        count=fence.place(torch.zeros(1).long()),
    )
    seen = {"digests": batch.columns["sums"], "sums": batch.columns["sums"]}
    launch_compare(records=batch.records, slots=batch.items.slots, **seen, out=out, backend=backend)
    if backend == "triton":
        enqueue(batch, rng, scheme, seen, out)


def enqueue(batch, rng, scheme, seen, out):
    """Counts that say anything, and a counter of findings that already does."""
    from canary_kernels.device.compare import enqueue_compare
    from canary_kernels.device.items import enqueue_items
    from canary_kernels.device.stamp import enqueue_stamp

    counts = {"run_count": batch.count(), "item_count": batch.count()}
    enqueue_items(batch.runs, batch.items, **counts, num_pages=batch.num_pages, page_size=batch.page_size)
    batch.scramble()
    enqueue_stamp(
        batch.records,
        batch.items,
        batch.runs.item_offsets,
        batch.seeds,
        *batch.columns.values(),
        **counts,
        scheme=scheme,
        key=rng.choice(HUGE),
    )
    out.count.fill_(rng.choice(HUGE))
    enqueue_compare(
        batch.records,
        batch.items.slots,
        *seen.values(),
        out,
        count=batch.count(),
        first=rng.choice((None, batch.count())),
    )


def read_beyond(fence):
    """Seven items, of which only one has a sum: a lie that the launcher's checks would refuse."""
    from canary_kernels.device.compare import enqueue_compare

    zeros = torch.zeros(7, dtype=torch.int64)
    enqueue_compare(
        allocate_records(1, CPU),
        zeros,
        zeros,
        fence.place(torch.zeros(1, dtype=torch.int64)),
        Findings.allocate(capacity=1, width=COMPARE_FIELDS, device=CPU),
        count=torch.tensor([7]),
    )


if __name__ == "__main__":
    fenced_rounds(run, read_beyond)

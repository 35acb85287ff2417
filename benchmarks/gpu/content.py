"""Passes over content: digest and sum, with the NaN scan, and with the comparison behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from canary_kernels import (
    COMPARE_FIELDS,
    STAMPED,
    DigestTable,
    Findings,
    GroupLayout,
    allocate_records,
    launch_compare,
    launch_digest,
)
from canary_kernels.device.compare import enqueue_compare

from benchmarks.gpu.geometry import Layout, sector_bytes
from benchmarks.gpu.workload import Backend, Place, Workload, sorted_rows

FINDING_CAPACITY = 4096


def random_slots(place: Place, layout: GroupLayout, count: int) -> torch.Tensor:
    """`count` different slots of the layout, in random order."""
    order = torch.randperm(layout.num_slots, generator=place.generator(), device=place.device)
    return order[:count].contiguous()


class Digests:
    """A digest's outputs for a capacity of slots, and its launch as a burst enqueues it."""

    def __init__(self, place: Place, layout: GroupLayout, capacity: int, *, scan: bool = False) -> None:
        self._table = DigestTable(layout)
        self._both = place.poisoned(2, capacity)
        self.digests, self.sums = self._both
        self.flags = place.poisoned(capacity, dtype=torch.uint8) if scan else None

    def launch(self, slots: torch.Tensor, count: torch.Tensor, backend: Backend) -> None:
        """All of `slots`; on `triton` the size comes from `count` on the device."""
        if backend == "triton":
            self._both.zero_()
            scan = {}
            if self.flags is not None:
                self.flags.zero_()
                scan = {"nonfinite": self.flags}
            self._table.device().enqueue(slots, count, self.digests, self.sums, **scan)
            return
        launch_digest(
            table=self._table,
            slots=slots,
            digests_out=self.digests,
            sums_out=self.sums,
            nonfinite_out=self.flags,
            backend=backend,
        )

    def results(self) -> list[torch.Tensor]:
        """Everything that is written."""
        return [self._both] + ([] if self.flags is None else [self.flags])


class DigestPass:
    """Digest and sum of `size` slots at random, each read once; optionally whether a NaN or infinity is among them."""

    sets = 1

    def __init__(self, place: Place, size: int, *, layout: GroupLayout, scan: bool) -> None:
        self.slots = random_slots(place, layout, size)
        self.bytes_moved = sector_bytes(layout, self.slots)
        self.count = place.vector([size])
        self.out = Digests(place, layout, size, scan=scan)

    def launch(self, number: int, backend: Backend) -> None:
        """See `Workload`."""
        self.out.launch(self.slots, self.count, backend)

    def results(self, number: int) -> list[torch.Tensor]:
        """See `Workload`."""
        return self.out.results()


class ComparePass:
    """A digest pass whose result is compared with the records; one slot in a million (at least one) is bad.

    `base` is the digest pass alone.
    """

    sets = 1

    def __init__(self, place: Place, size: int, *, layout: GroupLayout) -> None:
        self._pass = DigestPass(place, size, layout=layout, scan=False)
        self.base: Workload = self._pass
        self.bytes_moved = self._pass.bytes_moved
        self._slots = self._pass.slots
        self._records = allocate_records(layout.num_slots, place.device)
        self._pass.launch(0, "triton")
        # token, position, prev_hash, digest, sum, generation, flags
        known = torch.zeros((size, 8), dtype=torch.int64, device=place.device)
        known[:, 3] = self._pass.out.digests
        known[:, 4] = self._pass.out.sums
        known[:, 6] = STAMPED
        self._records[self._slots] = known
        for bad in range(0, size, 1_000_000):
            self._records[self._slots[bad], 3] ^= 1
        self._out = Findings.allocate(capacity=FINDING_CAPACITY, width=COMPARE_FIELDS, device=place.device)

    def launch(self, number: int, backend: Backend) -> None:
        """See `Workload`."""
        self._pass.launch(number, backend)
        self._out.reset()
        digests, sums = self._pass.out.digests, self._pass.out.sums
        if backend == "triton":
            enqueue_compare(self._records, self._slots, digests, sums, self._out, count=self._pass.count)
        else:
            launch_compare(
                records=self._records, slots=self._slots, digests=digests, sums=sums, out=self._out, backend=backend
            )

    def results(self, number: int) -> list[torch.Tensor]:
        """See `Workload`."""
        return [*self._pass.results(number), *sorted_rows(self._out.rows, self._out.count)]


def digest_pass(layout: Layout, *, scan: str | None = None) -> Callable[[Place, int], Workload]:
    """Builds a `DigestPass`; `scan` names the dtype that every region is scanned as."""

    def build(place: Place, size: int) -> Workload:
        group = layout(place, size)
        if scan is not None:
            regions = tuple(replace(region, dtype=scan) for region in group.regions)
            group = replace(group, regions=regions)
        return DigestPass(place, size, layout=group, scan=scan is not None)

    return build


def compare_pass(layout: Layout) -> Callable[[Place, int], Workload]:
    """Builds a `ComparePass`."""
    return lambda place, size: ComparePass(place, size, layout=layout(place, size))

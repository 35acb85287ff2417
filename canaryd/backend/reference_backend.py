"""Bursts by the torch references, piece by piece: for host pools, whose workers never load Triton."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from canary_kernels.compare import COMPARE_FIELDS, launch_compare
from canary_kernels.digest import DigestTable, launch_digest
from canary_kernels.findings import Findings
from canary_kernels.items import ItemRuns, Items, launch_plan_items
from canary_kernels.layout import GroupLayout
from canary_kernels.links import LINK_FIELDS, launch_links
from canary_kernels.notes import NOTE_FIELDS, launch_notes
from canary_kernels.scheme import Scheme
from canary_kernels.stamp import launch_stamp

from canaryd.backend.pieces import Cutter, Limits, Part
from canaryd.backend.pool_backend import PoolBackend, device_errors
from canaryd.backend.results import Results, Rows
from canaryd.errors import BackendError
from canaryd.watch.burst import (
    I64,
    NO_PREVIOUS,
    Burst,
    BurstResult,
    CompareWork,
    LinkWork,
    Runs,
    StampWork,
)

CHUNK_ITEMS = 8192


class ReferenceBackend(PoolBackend):
    """Runs each burst to its end in `start`."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        *,
        scheme: Scheme,
        key: int,
        chunk_items: int | None,
        finding_capacity: int,
    ) -> None:
        self._tables = [DigestTable(layout, scheme) for layout in layouts]
        super().__init__(layouts, scheme=scheme, key=key, finding_capacity=finding_capacity)
        items = chunk_items or CHUNK_ITEMS
        self._cutter = Cutter(layouts, limits=Limits(items=items, listed=items), scheme=scheme, key=key)
        self._launches: Counter[str] = Counter()
        self._result: BurstResult | None = None
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # more would take the engine's cores
        with device_errors():
            self._items = Items.allocate(items, self.device)
            self._digests = torch.empty(items, dtype=torch.int64, device=self.device)
            self._sums = torch.empty(items, dtype=torch.int64, device=self.device)
            self._nonfinite = torch.empty(items, dtype=torch.uint8, device=self.device)
            self._compares = Findings.allocate(capacity=finding_capacity, width=COMPARE_FIELDS, device=self.device)
            self._noted = Findings.allocate(capacity=finding_capacity, width=NOTE_FIELDS, device=self.device)
            self._broken = Findings.allocate(capacity=finding_capacity, width=LINK_FIELDS, device=self.device)

    def start(self, burst: Burst) -> None:
        """See `PoolBackend.start`."""
        self._check_open(None if self._result is None else self._result.number)
        began = time.perf_counter()
        self._launches.clear()
        results = Results(burst, self._finding_capacity)
        bytes_read = 0
        pieces = 0
        with device_errors():
            for piece in self._cutter.pieces(burst):
                pieces += 1
                for part in piece:
                    bytes_read += self._run(part, results) * self._layouts[part.group].slot_bytes
            self._check_copies(burst, results)
        self._result = BurstResult(
            number=burst.number,
            groups=results.groups(),
            bytes_read=bytes_read,
            busy_seconds=time.perf_counter() - began,
            launches=dict(self._launches),
            pieces=pieces,
        )

    def poll(self) -> BurstResult | None:
        """See `PoolBackend.poll`; a burst that was started is done."""
        result = self._result
        if result is None:
            raise BackendError("no burst was started")
        self._result = None
        return result

    def _wait(self) -> None:
        pass

    def _drop(self) -> None:
        self._result = None
        self._tables.clear()
        del self._cutter

    # --- one group's part of a piece --------------------------------------------------------------------------------

    def _run(self, part: Part, results: Results) -> int:
        """Runs a part; how many slots it read."""
        count = 0
        if part.stamps is not None:
            count += self._stamp(part, part.stamps, results)
        if part.links is not None:
            self._check_links(part.group, part.links)
            total, rows = _listed(self._broken)
            results.add_links(part.work, total=total, rows=rows, base=part.link_base)
        if part.compare is not None:
            count += self._compare(part.group, part.compare)
            total, rows = _listed(self._compares)
            results.add_compare(part.work, total=total, rows=rows, base=part.compare_base)
        return count

    def _stamp(self, part: Part, work: StampWork, results: Results) -> int:
        group = part.group
        runs, items = self._plan(group, work.runs)
        nonfinite = self._nonfinite[: items.slots.numel()]
        digests, sums = self._digest(group, items, nonfinite)
        self._noted.reset()
        launch_notes(
            records=self._records[group],
            slots=items.slots,
            digests=digests,
            sums=sums,
            nonfinite=nonfinite,
            out=self._noted,
            backend="reference",
        )
        total, rows = _listed(self._noted)
        results.add_notes(part.work, total=total, rows=rows, base=part.stamp_base)
        launch_stamp(
            records=self._records[group],
            slots=items.slots,
            positions=items.positions,
            item_offsets=runs.item_offsets,
            seeds=self._tensor(work.seeds),
            tokens=self._tensor(work.tokens),
            generations=self._tensor(work.generations),
            digests=digests,
            sums=sums,
            scheme=self._scheme,
            key=self._key,
            backend="reference",
        )
        self._launches["write"] += 1
        return items.slots.numel()

    def _check_links(self, group: int, work: LinkWork) -> None:
        self._broken.reset()
        launch_links(
            records=self._records[group],
            runs=self._runs(work.runs, work.prev_slots),
            tokens=self._tensor(work.tokens),
            heads=self._tensor(work.heads),
            out=self._broken,
            page_size=self._layouts[group].page_size,
            scheme=self._scheme,
            key=self._key,
            backend="reference",
        )
        self._launches["verify"] += 1

    def _compare(self, group: int, work: CompareWork) -> int:
        self._compares.reset()
        _, items = self._plan(group, work.runs)
        digests, sums = self._digest(group, items)
        launch_compare(
            records=self._records[group],
            slots=items.slots,
            digests=digests,
            sums=sums,
            out=self._compares,
            backend="reference",
        )
        self._launches["compare"] += 1
        return items.slots.numel()

    def _plan(self, group: int, runs: Runs) -> tuple[ItemRuns, Items]:
        layout = self._layouts[group]
        planned = self._runs(runs, np.full(runs.lengths.size, NO_PREVIOUS, dtype=np.int64))
        items = self._items.head(runs.items)
        launch_plan_items(
            runs=planned, out=items, num_pages=layout.num_pages, page_size=layout.page_size, backend="reference"
        )
        self._launches["plan"] += 1
        return planned, items

    def _runs(self, runs: Runs, previous: I64) -> ItemRuns:
        offsets = np.zeros(runs.lengths.size + 1, dtype=np.int64)
        np.cumsum(runs.lengths, out=offsets[1:])
        return ItemRuns(
            pages=self._tensor(runs.pages),
            page_offsets=self._tensor(runs.page_offsets),
            first_offsets=self._tensor(runs.first_offsets),
            item_offsets=self._tensor(offsets),
            first_positions=self._tensor(runs.first_positions),
            first_prev_slots=self._tensor(previous),
        )

    def _digest(
        self, group: int, items: Items, nonfinite: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = items.slots.numel()
        digests, sums = self._digests[:count], self._sums[:count]
        launch_digest(
            table=self._tables[group],
            slots=items.slots,
            digests_out=digests,
            sums_out=sums,
            nonfinite_out=nonfinite,
            backend="reference",
        )
        self._launches["digest"] += 1
        return digests, sums

    def _tensor(self, array: I64) -> torch.Tensor:
        """The array on the device, in place where it can be; read-only arrays are copied, since torch has no such
        tensors."""
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)


def _listed(findings: Findings) -> tuple[int, Rows]:
    total = int(findings.count)
    return total, findings.rows[: min(total, findings.rows.shape[0])].cpu().numpy()

"""One group's share of a burst on the device: its lists, its scratch, its launches, and what they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from canary_kernels.compare import COMPARE_FIELDS
from canary_kernels.constants import signed
from canary_kernels.device.compare import enqueue_compare
from canary_kernels.device.items import enqueue_items
from canary_kernels.device.links import enqueue_links
from canary_kernels.device.notes import enqueue_notes
from canary_kernels.device.stamp import enqueue_stamp
from canary_kernels.digest import DigestTable
from canary_kernels.findings import Findings
from canary_kernels.items import ItemRuns, Items
from canary_kernels.layout import GroupLayout
from canary_kernels.links import LINK_FIELDS
from canary_kernels.notes import NOTE_FIELDS
from canary_kernels.scheme import Scheme
from canary_kernels.worklist import WorkList

from canaryd.backend.pieces import Part
from canaryd.backend.results import Results
from canaryd.watch.burst import I64, Runs

# Words of a group's sizes, two apart so that each is 16-byte aligned as every other tensor is.
STAMP_ITEMS, STAMP_RUNS, READ_ITEMS, READ_RUNS, COMPARE_ITEMS, LINK_ITEMS, LINK_RUNS = range(0, 14, 2)
MISMATCHES, BROKEN, NOTED = 14, 16, 18
"""Counts of the result lists; the host sends zeros."""
SIZES = 20

# A group's segments of the work list. Slots that are read: those of the stamps first, then those of the compares.
_RUN_SEGMENTS = 5
_READ = 0
_TOKENS, _GENERATIONS, _SEEDS = range(_READ + _RUN_SEGMENTS, _READ + _RUN_SEGMENTS + 3)
_LINKS = _SEEDS + 1
_PREVIOUS, _LINK_TOKENS, _HEADS = range(_LINKS + _RUN_SEGMENTS, _LINKS + _RUN_SEGMENTS + 3)
SEGMENTS = _HEADS + 1


def segment_capacities(listed: int) -> list[int]:
    """Words of each of a group's segments, for lists of at most `listed`."""
    runs = [listed, listed + 1, listed, listed + 1, listed]
    return [*runs, listed, listed, listed, *runs, listed, listed, listed]


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """What the groups use one after the other: the slots that are read, what was read, int64 [capacity] each, and
    whether it holds NaN or infinity, uint8 [capacity]."""

    items: Items
    read: torch.Tensor
    nonfinite: torch.Tensor

    @classmethod
    def allocate(cls, capacity: int, device: torch.device) -> Scratch:
        """Uninitialised scratch."""
        return cls(
            items=Items.allocate(capacity, device),
            read=torch.empty((2, capacity), dtype=torch.int64, device=device),
            nonfinite=torch.empty(capacity, dtype=torch.uint8, device=device),
        )

    @property
    def digests(self) -> torch.Tensor:
        """One digest per item."""
        return self.read[0]

    @property
    def sums(self) -> torch.Tensor:
        """One sum per item."""
        return self.read[1]


class GroupKernels:
    """Packs a part of a piece, and launches the kernels that work it off.

    Args:
        layout, records, table: the group.
        worklist, first_segment: where its `SEGMENTS` segments are.
        sizes: its `SIZES` words on the device.
        found: the same words on the host, where the device hands them back.
        scratch: shared by all groups.
        finding_capacity: rows of each result list.
        scheme, key: of the fingerprints.
    """

    def __init__(
        self,
        *,
        layout: GroupLayout,
        records: torch.Tensor,
        table: DigestTable,
        worklist: WorkList,
        first_segment: int,
        sizes: torch.Tensor,
        found: I64,
        scratch: Scratch,
        finding_capacity: int,
        scheme: Scheme,
        key: int,
    ) -> None:
        self._layout = layout
        self._records = records
        self._scratch = scratch
        self._scheme: Scheme = scheme
        self._key = signed(key)
        self._worklist = worklist
        self._first = first_segment
        self._sizes = [sizes[word : word + 1] for word in range(SIZES)]
        self._digest = table.device()
        if scheme == "sglang":
            self._digest.reserve(scratch.items.slots.numel())
        self._read_runs = self._runs(_READ, None)
        self._link_runs = self._runs(_LINKS, _PREVIOUS)
        tokens = self._segment(_TOKENS)
        self._stamped = scratch.items.head(tokens.numel())
        pinned = records.is_cuda
        self._compares = Findings(
            rows=torch.zeros((finding_capacity, COMPARE_FIELDS), dtype=torch.int64, pin_memory=pinned),
            count=self._sizes[MISMATCHES],
        )
        self._broken = Findings(
            rows=torch.zeros((finding_capacity, LINK_FIELDS), dtype=torch.int64, pin_memory=pinned),
            count=self._sizes[BROKEN],
        )
        self._noted = Findings(
            rows=torch.zeros((finding_capacity, NOTE_FIELDS), dtype=torch.int64, pin_memory=pinned),
            count=self._sizes[NOTED],
        )
        self._found = found

    def _segment(self, number: int) -> torch.Tensor:
        return self._worklist.segment(self._first + number)

    def _runs(self, first: int, previous: int | None) -> ItemRuns:
        """Runs without previous slots get others' words there: nothing reads what comes of them."""
        pages, page_offsets, first_offsets, item_offsets, first_positions = (
            self._segment(first + number) for number in range(_RUN_SEGMENTS)
        )
        return ItemRuns(
            pages=pages,
            page_offsets=page_offsets,
            first_offsets=first_offsets,
            item_offsets=item_offsets,
            first_positions=first_positions,
            first_prev_slots=first_positions if previous is None else self._segment(previous),
        )

    # --- the device -------------------------------------------------------------------------------------------------

    def enqueue(self) -> None:
        """All launches, with the sizes that the device holds when they run. Nothing else: a graph can capture it."""
        items, sizes = self._scratch.items, self._sizes
        digests, sums = self._scratch.digests, self._scratch.sums
        enqueue_items(
            self._read_runs,
            items,
            run_count=sizes[READ_RUNS],
            item_count=sizes[READ_ITEMS],
            num_pages=self._layout.num_pages,
            page_size=self._layout.page_size,
        )
        nonfinite = self._scratch.nonfinite
        self._scratch.read.zero_()
        nonfinite.zero_()
        self._digest.enqueue(items.slots, sizes[READ_ITEMS], digests, sums, nonfinite=nonfinite, scheme=self._scheme)
        listed = self._stamped.slots.numel()
        enqueue_notes(
            self._records,
            self._stamped.slots,
            digests[:listed],
            sums[:listed],
            nonfinite[:listed],
            self._noted,
            count=sizes[STAMP_ITEMS],
        )
        enqueue_stamp(
            self._records,
            self._stamped,
            self._read_runs.item_offsets,
            self._segment(_SEEDS),
            self._segment(_TOKENS),
            self._segment(_GENERATIONS),
            digests[:listed],
            sums[:listed],
            run_count=sizes[STAMP_RUNS],
            item_count=sizes[STAMP_ITEMS],
            scheme=self._scheme,
            key=self._key,
        )
        enqueue_links(
            records=self._records,
            runs=self._link_runs,
            run_count=sizes[LINK_RUNS],
            item_count=sizes[LINK_ITEMS],
            tokens=self._segment(_LINK_TOKENS),
            heads=self._segment(_HEADS),
            out=self._broken,
            page_size=self._layout.page_size,
            scheme=self._scheme,
            key=self._key,
        )
        enqueue_compare(
            self._records,
            items.slots,
            digests,
            sums,
            self._compares,
            count=sizes[COMPARE_ITEMS],
            first=sizes[STAMP_ITEMS],
        )

    # --- the host ---------------------------------------------------------------------------------------------------

    def pack(self, part: Part, sizes: I64) -> int:
        """Fills the group's segments and its `sizes` (zero before); how many slots the part reads."""
        stamps, links, compare = part.stamps, part.links, part.compare
        if stamps is not None or compare is not None:
            listed = [work.runs for work in (stamps, compare) if work is not None]
            sizes[READ_RUNS], sizes[READ_ITEMS] = self._pack_runs(_READ, listed)
        if stamps is not None:
            self._room(_TOKENS, stamps.tokens)
            self._room(_GENERATIONS, stamps.generations)
            self._room(_SEEDS, stamps.seeds)
            sizes[STAMP_ITEMS], sizes[STAMP_RUNS] = stamps.tokens.size, stamps.seeds.size
        read = int(sizes[READ_ITEMS])
        sizes[COMPARE_ITEMS] = read - sizes[STAMP_ITEMS]
        if links is not None:
            sizes[LINK_RUNS], sizes[LINK_ITEMS] = self._pack_runs(_LINKS, [links.runs])
            self._room(_PREVIOUS, links.prev_slots)
            self._room(_LINK_TOKENS, links.tokens)
            self._room(_HEADS, links.heads)
        return read

    def _room(self, segment: int, values: I64) -> None:
        self._worklist.room(self._first + segment, values.size)[:] = values

    def _pack_runs(self, first: int, listed: Sequence[Runs]) -> tuple[int, int]:
        """Packs runs one behind the other; (runs, items)."""
        count = sum(runs.lengths.size for runs in listed)
        pages = sum(runs.pages.size for runs in listed)
        room, segment = self._worklist.room, self._first + first
        to_pages = room(segment, pages)
        to_page_offsets = room(segment + 1, count + 1)
        to_first_offsets = room(segment + 2, count)
        to_item_offsets = room(segment + 3, count + 1)
        to_positions = room(segment + 4, count)
        to_item_offsets[0] = 0
        run = page = 0
        for runs in listed:
            end, page_end = run + runs.lengths.size, page + runs.pages.size
            to_pages[page:page_end] = runs.pages
            np.add(runs.page_offsets, page, out=to_page_offsets[run : end + 1])
            to_first_offsets[run:end] = runs.first_offsets
            to_item_offsets[run + 1 : end + 1] = runs.lengths
            to_positions[run:end] = runs.first_positions
            run, page = end, page_end
        np.cumsum(to_item_offsets, out=to_item_offsets)
        return count, int(to_item_offsets[-1])

    def launches(self, part: Part) -> list[str]:
        """Labels of the launches that have work to do."""
        labels = ["plan", "digest"] if part.stamps is not None or part.compare is not None else []
        works = {"write": part.stamps, "verify": part.links, "compare": part.compare}
        return labels + [label for label, work in works.items() if work is not None]

    def collect(self, part: Part, results: Results) -> None:
        """Hands on what the part's launches found, once they are complete."""
        if part.stamps is not None:
            total = int(self._found[NOTED])
            rows = self._noted.rows[:total].numpy()
            results.add_notes(part.work, total=total, rows=rows, base=part.stamp_base)
        if part.compare is not None:
            total = int(self._found[MISMATCHES])
            rows = self._compares.rows[:total].numpy()
            results.add_compare(part.work, total=total, rows=rows, base=part.compare_base)
        if part.links is not None:
            total = int(self._found[BROKEN])
            rows = self._broken.rows[:total].numpy()
            results.add_links(part.work, total=total, rows=rows, base=part.link_base)

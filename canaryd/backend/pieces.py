"""Cuts a burst into pieces that fit a backend's scratch. Pure numpy.

Most bursts are one piece, taken as they are. A larger one is cut so that the pieces, run one after the other, do what
the whole would: a work's stamps come before its links and compares, chains and links go on where they were cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
from canary_kernels.chain import chain_hashes
from canary_kernels.layout import GroupLayout
from canary_kernels.scheme import Scheme

from canaryd.backend.chunks import Chunk, cut
from canaryd.watch.burst import I64, UNCHECKED_PREVIOUS, Burst, CompareWork, GroupWork, LinkWork, StampWork


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one piece may hold of one group.

    `items`: slots that are read (stamps and compares together). `listed`: length of each list that is sent; so also
    stamps, links, and the runs and pages of stamps and compares together.
    """

    items: int
    listed: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One group's share of a piece, of work number `work` of its burst. Items are numbered from 0 here, and from
    `stamp_base`, `link_base` and `compare_base` in the work. What is not None has items."""

    work: int
    group: int
    stamps: StampWork | None = None
    links: LinkWork | None = None
    compare: CompareWork | None = None
    stamp_base: int = 0
    link_base: int = 0
    compare_base: int = 0


class Cutter:
    """Cuts the bursts of one pool.

    Args:
        layouts: one per group.
        limits: of each group.
        scheme, key: the chain, which goes on from one piece to the next.
    """

    def __init__(self, layouts: Sequence[GroupLayout], *, limits: Limits, scheme: Scheme, key: int) -> None:
        self._layouts = layouts
        self._limits = limits
        self._scheme: Scheme = scheme
        self._key = key

    def pieces(self, burst: Burst) -> Iterator[tuple[Part, ...]]:
        """Pieces in order, each with at most one part per group; works without items have none."""
        queues: dict[int, list[Iterator[Part]]] = {}
        for number, work in enumerate(burst.works):
            queues.setdefault(work.group, []).append(self._parts(number, work))
        for parts in zip_longest(*(chain.from_iterable(queue) for queue in queues.values())):
            yield tuple(part for part in parts if part is not None)

    def _parts(self, number: int, work: GroupWork) -> Iterator[Part]:
        if self._fits(work):
            part = Part(
                work=number,
                group=work.group,
                stamps=work.stamps if work.stamps is not None and work.stamps.tokens.size else None,
                links=work.links if work.links is not None and work.links.tokens.size else None,
                compare=work.compare if work.compare is not None and work.compare.runs.lengths.any() else None,
            )
            if part.stamps or part.links or part.compare:
                yield part
            return
        for stamps in self._stamps(work):
            yield Part(work=number, group=work.group, stamps=stamps[1], stamp_base=stamps[0])
        for links, compare in zip_longest(self._links(work), self._compares(work)):
            yield Part(
                work=number,
                group=work.group,
                links=None if links is None else links[1],
                link_base=0 if links is None else links[0],
                compare=None if compare is None else compare[1],
                compare_base=0 if compare is None else compare[0],
            )

    def _fits(self, work: GroupWork) -> bool:
        limits = self._limits
        listed, items, runs, pages = 0, 0, 0, 0
        if work.links is not None:
            listed = max(work.links.tokens.size, work.links.runs.lengths.size, work.links.runs.pages.size)
        if work.stamps is not None:
            items, runs, pages = work.stamps.tokens.size, work.stamps.runs.lengths.size, work.stamps.runs.pages.size
            listed = max(listed, items)
        if work.compare is not None:
            items += work.compare.runs.items
            runs += work.compare.runs.lengths.size
            pages += work.compare.runs.pages.size
        return items <= limits.items and max(listed, runs, pages) <= limits.listed

    def _stamps(self, work: GroupWork) -> Iterator[tuple[int, StampWork]]:
        stamps = work.stamps
        if stamps is None:
            return
        carried = 0
        for chunk in self._cut(work.group, stamps):
            own = slice(chunk.first_item, chunk.first_item + chunk.count)
            seeds = stamps.seeds[chunk.run_index]
            if chunk.continues:
                seeds[0] = carried
            tokens = stamps.tokens[own]
            part = StampWork(runs=chunk.runs, tokens=tokens, generations=stamps.generations[own], seeds=seeds)
            yield chunk.first_item, part
            if own.stop < stamps.tokens.size:
                carried = self._hash_after(work.group, chunk, int(seeds[-1]), tokens)

    def _hash_after(self, group: int, chunk: Chunk, seed: int, tokens: I64) -> int:
        """The chain hash after the last run's items of this chunk: the seed of its rest in the next one."""
        last = chunk.run_index.size - 1
        slots = self._last_slots(group, chunk)
        positions = chunk.runs.first_positions[last] + np.arange(slots.size, dtype=np.int64)
        _, after = chain_hashes(
            self._scheme,
            np.array([seed], dtype=np.int64),
            tokens[chunk.item_offsets[last] :],
            np.where(slots < self._layouts[group].num_slots, positions, -1),
            np.array([0, slots.size], dtype=np.int64),
            self._key,
        )
        return int(after[-1])

    def _links(self, work: GroupWork) -> Iterator[tuple[int, LinkWork]]:
        links = work.links
        if links is None:
            return
        carried = UNCHECKED_PREVIOUS
        for chunk in self._cut(work.group, links):
            own = slice(chunk.first_item, chunk.first_item + chunk.count)
            previous = links.prev_slots[chunk.run_index]
            if chunk.continues:
                previous[0] = carried
            yield (
                chunk.first_item,
                LinkWork(
                    runs=chunk.runs,
                    tokens=links.tokens[own],
                    prev_slots=previous,
                    heads=links.heads[chunk.run_index],
                ),
            )
            last = int(self._last_slots(work.group, chunk)[-1])
            carried = last if last < self._layouts[work.group].num_slots else UNCHECKED_PREVIOUS

    def _compares(self, work: GroupWork) -> Iterator[tuple[int, CompareWork]]:
        if work.compare is not None:
            for chunk in self._cut(work.group, work.compare):
                yield chunk.first_item, CompareWork(runs=chunk.runs)

    def _cut(self, group: int, work: StampWork | LinkWork | CompareWork) -> Iterator[Chunk]:
        capacity = min(self._limits.items, self._limits.listed)
        return cut(work.runs, page_size=self._layouts[group].page_size, capacity=capacity)

    def _last_slots(self, group: int, chunk: Chunk) -> I64:
        layout = self._layouts[group]
        last = chunk.run_index.size - 1
        return chunk.slots_of_run(last, num_pages=layout.num_pages, page_size=layout.page_size)

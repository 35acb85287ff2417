"""A numpy backend: executes bursts on real bytes, step by step, so that writes can come in between its reads."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
from canary_kernels.chain import chain_hashes
from canary_kernels.constants import NOTE_NONFINITE, NOTE_UNCHANGED

from canaryd.watch.burst import (
    FAIL_CHAIN,
    FAIL_POSITION,
    FAIL_RANGE,
    FAIL_TOKEN,
    I64,
    NO_PREVIOUS,
    Burst,
    BurstResult,
    CompareMismatches,
    CompareWork,
    CopyMismatches,
    CopyWork,
    GroupResult,
    LinkMismatches,
    LinkWork,
    StampNotes,
    StampWork,
)
from canaryd.watch.runs import expand_runs

WORDS = 4
NAN = 0x7FF0_7FF0_7FF0_7FF0
"""The one word that counts as not finite."""


@dataclass
class Records:
    """One record per slot, as the device keeps them."""

    token: I64
    position: I64
    prev_hash: I64
    digest: I64
    sum: I64
    generation: I64
    stamped: np.ndarray

    @classmethod
    def empty(cls, n: int) -> Records:
        # Poisoned: what was never stamped must never be believed.
        columns = [np.full(n, 0x5A5A5A5A5A5A5A5A, dtype=np.int64) for _ in range(6)]
        return cls(*columns, stamped=np.zeros(n, dtype=np.bool_))


class FakeBackend:
    """`memories`: one int64 array [num_slots, WORDS] per group, shared with the engine."""

    def __init__(self, memories: list[I64], page_sizes: list[int], scheme: str = "native", key: int = 0) -> None:
        self.memories = memories
        self.page_sizes = page_sizes
        self.scheme = scheme
        self.key = key
        self.records = [Records.empty(memory.shape[0]) for memory in memories]
        self.capacity: int | None = None
        self.note_capacity: int | None = None
        rng = np.random.default_rng(7)
        self._factors = rng.integers(-(1 << 62), 1 << 62, size=WORDS) | 1

    def run(self, burst: Burst) -> BurstResult:
        steps = self.run_slowly(burst, chunk=1 << 30)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return stop.value

    def run_slowly(self, burst: Burst, chunk: int = 8) -> Generator[None, None, BurstResult]:
        results = []
        for work in burst.works:
            notes = None
            if work.stamps is not None:
                notes = yield from self._stamp(work.group, work.stamps, chunk)
            compare = None
            if work.compare is not None:
                compare = yield from self._compare(work.group, work.compare, chunk)
            links = self._links(work.group, work.links) if work.links is not None else None
            results.append(
                GroupResult(
                    group=work.group,
                    compare=compare,
                    links=links,
                    stamps=notes,
                    copies=self._copies(work.group, work.copies),
                )
            )
        return BurstResult(number=burst.number, groups=tuple(results))

    def _copies(self, group: int, work: CopyWork | None) -> CopyMismatches | None:
        if work is None:
            return None
        records = self.records[group]
        read = [
            column[slots] for column in (records.digest, records.sum) for slots in (work.sources, work.destinations)
        ]
        items = np.flatnonzero((read[0] != read[1]) | (read[2] != read[3]))
        return CopyMismatches(
            items=items,
            source_digests=read[0][items],
            digests=read[1][items],
            source_sums=read[2][items],
            sums=read[3][items],
        )

    def _read(self, group: int, slots: I64, chunk: int) -> Generator[None, None, tuple[I64, I64]]:
        memory = self.memories[group]
        digests, sums = np.zeros(slots.size, dtype=np.int64), np.zeros(slots.size, dtype=np.int64)
        assert ((slots >= 0) & (slots < memory.shape[0])).all()
        for first in range(0, slots.size, chunk):
            part = slice(first, first + chunk)
            words = memory[slots[part]]
            digests[part] = ((words ^ (words >> 17)) * self._factors).sum(axis=1)
            sums[part] = words.sum(axis=1)
            yield
        return digests, sums

    def _stamp(self, group: int, work: StampWork, chunk: int) -> Generator[None, None, StampNotes]:
        slots, positions = expand_runs(work.runs, self.page_sizes[group])
        assert slots.size == work.tokens.size == work.generations.size
        assert work.seeds.size == work.runs.lengths.size
        assert np.unique(slots).size == slots.size
        assert (positions >= 0).all()
        offsets = np.concatenate([[0], np.cumsum(work.runs.lengths)])
        before, _ = chain_hashes(self.scheme, work.seeds, work.tokens, positions, offsets, self.key)
        digests, sums = yield from self._read(group, slots, chunk)
        records = self.records[group]
        unchanged = records.stamped[slots] & (records.digest[slots] == digests) & (records.sum[slots] == sums)
        nonfinite = (self.memories[group][slots] == NAN).any(axis=1)
        bits = NOTE_UNCHANGED * unchanged + NOTE_NONFINITE * nonfinite
        records.token[slots] = work.tokens
        records.position[slots] = positions
        records.prev_hash[slots] = before
        records.digest[slots] = digests
        records.sum[slots] = sums
        records.generation[slots] = work.generations
        records.stamped[slots] = True
        items = np.flatnonzero(bits)
        listed = items[: self.note_capacity]
        return StampNotes(items=listed, bits=bits[listed], truncated=int(items.size - listed.size))

    def _compare(self, group: int, work: CompareWork, chunk: int) -> Generator[None, None, CompareMismatches]:
        slots, _ = expand_runs(work.runs, self.page_sizes[group])
        records = self.records[group]
        assert np.unique(slots).size == slots.size
        assert records.stamped[slots].all(), "compared a slot that was never stamped"
        digests, sums = yield from self._read(group, slots, chunk)
        bad = np.flatnonzero((digests != records.digest[slots]) | (sums != records.sum[slots]))
        listed = bad if self.capacity is None else bad[: self.capacity]
        return CompareMismatches(
            items=listed,
            stored_digests=records.digest[slots[listed]],
            seen_digests=digests[listed],
            stored_sums=records.sum[slots[listed]],
            seen_sums=sums[listed],
            truncated=int(bad.size - listed.size),
        )

    def _links(self, group: int, work: LinkWork) -> LinkMismatches:
        slots, positions = expand_runs(work.runs, self.page_sizes[group])
        records = self.records[group]
        n = slots.size
        assert n == work.tokens.size
        assert work.prev_slots.size == work.heads.size == work.runs.lengths.size
        inside = (slots >= 0) & (slots < records.token.size)
        safe = np.where(inside, slots, 0)
        run = np.repeat(np.arange(work.runs.lengths.size), work.runs.lengths)
        heads_at = np.cumsum(work.runs.lengths) - work.runs.lengths
        previous = np.concatenate([[0], slots[:-1]])
        previous[heads_at] = work.prev_slots
        has_previous = previous >= 0
        before = np.where(has_previous, previous, 0)
        _, linked = chain_hashes(
            self.scheme,
            records.prev_hash[before],
            records.token[before],
            records.position[before],
            np.arange(n + 1),
            self.key,
        )
        expected = np.where(previous == NO_PREVIOUS, work.heads[run], linked)
        stamped = inside & records.stamped[safe]
        known = stamped & (records.token[safe] >= 0)
        usable = records.stamped[before] & (records.token[before] >= 0)
        judged = known & ((previous == NO_PREVIOUS) | (has_previous & usable))
        bits = np.where(judged & (records.prev_hash[safe] != expected), FAIL_CHAIN, 0)
        bits |= np.where(stamped & (records.position[safe] != positions), FAIL_POSITION, 0)
        bits |= np.where(known & (work.tokens != -1) & (records.token[safe] != work.tokens), FAIL_TOKEN, 0)
        bits |= np.where(~inside, FAIL_RANGE, 0)
        bad = np.flatnonzero(bits)
        return LinkMismatches(items=bad, bits=bits[bad])

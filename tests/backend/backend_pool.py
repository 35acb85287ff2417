"""A small pool of two groups with rows on it, and the works that a core would ask for."""

from __future__ import annotations

import numpy as np
import torch
from canary_kernels import GroupLayout, Region, chain_hashes, chain_head

from canaryd.backend.pool_backend import make_backend
from canaryd.watch.burst import (
    NO_PREVIOUS,
    Burst,
    CompareWork,
    GroupWork,
    LinkWork,
    Runs,
    StampWork,
)

SECRET = 0xFEDC_BA98_7654_3210


def column(*values):
    return np.array(values, dtype=np.int64)


class Rows:
    """Rows of one group as runs, with the tokens and seeds that belong to them."""

    def __init__(self, group, scheme, pages, lengths, *, first_offsets=None, random):
        self.group, self.scheme = group, scheme
        self.pages = [np.asarray(listed, dtype=np.int64) for listed in pages]
        self.lengths = column(*lengths)
        self.first_offsets = column(*(first_offsets or [0] * len(lengths)))
        self.tokens = random.integers(0, 1 << 17, int(self.lengths.sum()), dtype=np.int64)
        self.generations = random.integers(1, 1 << 40, self.tokens.size, dtype=np.int64)
        self.head = chain_head(scheme)

    @property
    def runs(self):
        return Runs(
            pages=np.concatenate([*self.pages, column()]),
            page_offsets=column(0, *np.cumsum([listed.size for listed in self.pages])),
            first_offsets=self.first_offsets,
            lengths=self.lengths,
            first_positions=self.first_offsets,
        )

    @property
    def slots(self):
        page_size = self.group.page_size
        slots = []
        for listed, first, length in zip(self.pages, self.first_offsets, self.lengths, strict=True):
            offsets = first + np.arange(length)
            slots += (listed[offsets // page_size] * page_size + offsets % page_size).tolist()
        return slots

    @property
    def seeds(self):
        return np.full(self.lengths.size, self.head, dtype=np.int64)

    def before(self):
        """prev_hash of each item."""
        offsets = column(0, *np.cumsum(self.lengths))
        positions = np.concatenate(
            [first + np.arange(length) for first, length in zip(self.first_offsets, self.lengths, strict=True)]
        )
        return chain_hashes(self.scheme, self.seeds, self.tokens, positions, offsets, SECRET)[0]

    def stamps(self):
        return StampWork(runs=self.runs, tokens=self.tokens, generations=self.generations, seeds=self.seeds)

    def compare(self):
        return CompareWork(runs=self.runs)

    def links(self, **changes):
        fields = {
            "runs": self.runs,
            "tokens": self.tokens,
            "prev_slots": np.full(self.lengths.size, NO_PREVIOUS, dtype=np.int64),
            "heads": self.seeds,
        }
        return LinkWork(**(fields | changes))


class Pool:
    """Group 0: two flat regions and one of heads, page size 16; group 1: one flat region, page size 1."""

    def __init__(self, seed, scheme, place, **sizes):
        self.scheme = scheme
        self.random = np.random.default_rng(seed)
        self.device = place[0]
        memory = torch.from_numpy(self.random.integers(0, 256, 40_000, dtype=np.uint8)).to(self.device)
        flat = {"page_stride": 16 * 32, "slot_stride": 32, "piece_bytes": 32}
        heads = {"page_stride": 16 * 48, "slot_stride": 16, "piece_bytes": 16, "pieces": 3, "piece_stride": 256}
        self.layouts = [
            GroupLayout(
                regions=(
                    Region(memory=memory, offset=64, **flat),
                    Region(memory=memory, offset=8192, **flat),
                    Region(memory=memory, offset=16384, **heads),
                ),
                num_pages=12,
                page_size=16,
            ),
            GroupLayout(
                regions=(
                    Region(memory=memory, offset=30000 - 30000 % 16, page_stride=144, slot_stride=0, piece_bytes=144),
                ),
                num_pages=50,
                page_size=1,
            ),
        ]
        self.memory = memory
        self.backend = make_backend(self.layouts, scheme=scheme, key=SECRET, backend=place[1], **sizes)
        self.rows = [
            Rows(
                self.layouts[0],
                scheme,
                [[3, 7, 1], [], [9, 2, 4, 11]],
                [41, 0, 52],
                first_offsets=[0, 0, 5],
                random=self.random,
            ),
            Rows(self.layouts[1], scheme, [[5, 9, 3, 44, 20]], [5], random=self.random),
        ]

    def run(self, *works):
        return self.backend.run(Burst(number=7, works=works))

    def stamp(self):
        return self.run(*(GroupWork(group=number, stamps=rows.stamps()) for number, rows in enumerate(self.rows)))

    def flip(self, group, slot, region, byte, mask=1):
        """Changes one byte of a slot, as an engine would."""
        layout = self.layouts[group]
        spec = layout.regions[region]
        page, offset = divmod(slot, layout.page_size)
        piece, within = divmod(byte, spec.piece_bytes)
        at = spec.offset + page * spec.page_stride + offset * spec.slot_stride + piece * spec.piece_stride + within
        spec.memory[at] ^= mask
        if self.device == "cuda":
            torch.cuda.synchronize()

"""From lists of slots to runs over page lists, as bursts carry them."""

from __future__ import annotations

import numpy as np

from canaryd.watch.burst import I64, Runs
from canaryd.watch.columns import Mask, offsets_of, pages_of


def run_starts(slots: I64, page_size: int, breaks: Mask) -> Mask:
    """Where a run must start: where `breaks` [n] says so, and where the place in the page does not go on."""
    starts = breaks.copy()
    starts[:1] = True
    offsets = offsets_of(slots, page_size)
    follows = (offsets[1:] == offsets[:-1] + 1) & (slots[1:] == slots[:-1] + 1)
    follows |= (offsets[1:] == 0) & (offsets[:-1] == page_size - 1)
    starts[1:] |= ~follows
    return starts


def make_runs(slots: I64, positions: I64, starts: Mask, page_size: int) -> Runs:
    """Runs over `slots` [n] in their order. `starts` [n] comes from `run_starts`; `positions` [n]: those of run starts
    are used, the others follow."""
    offsets = offsets_of(slots, page_size)
    page_heads = np.flatnonzero(starts | (offsets == 0))
    heads = np.flatnonzero(starts)
    return Runs(
        pages=pages_of(slots[page_heads], page_size),
        page_offsets=np.concatenate([np.searchsorted(page_heads, heads), [page_heads.size]]).astype(np.int64),
        first_offsets=offsets[heads],
        lengths=np.diff(np.append(heads, slots.size)),
        first_positions=positions[heads],
    )


def unordered_runs(slots: I64, page_size: int) -> Runs:
    """Runs over sorted `slots` [n] whose positions do not matter: broken where slots do not follow each other."""
    breaks = np.zeros(slots.size, dtype=np.bool_)
    np.not_equal(slots[1:], slots[:-1] + 1, out=breaks[1:])
    starts = run_starts(slots, page_size, breaks)
    return make_runs(slots, np.zeros_like(slots), starts, page_size)


def expand_runs(runs: Runs, page_size: int) -> tuple[I64, I64]:
    """Slots and positions of all items, [n] each: what a backend's plan computes."""
    run = np.repeat(np.arange(runs.lengths.size), runs.lengths)
    within = np.arange(run.size) - np.repeat(np.cumsum(runs.lengths) - runs.lengths, runs.lengths)
    place = runs.first_offsets[run] + within
    pages = runs.pages[runs.page_offsets[run] + place // page_size]
    return pages * page_size + place % page_size, runs.first_positions[run] + within

"""Columns of integers: from the wire, and the index arithmetic that keeps loops out of Python."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from canaryd.watch.burst import I64

Mask = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]


def expand(starts: I64, counts: I64) -> tuple[I64, I64]:
    """The ranges [starts[i], starts[i] + counts[i]) one after the other, and the i of each element; both [sum]."""
    total = int(counts.sum())
    owner = np.repeat(np.arange(counts.size), counts)
    ahead = np.cumsum(counts) - counts
    return np.arange(total) + np.repeat(starts - ahead, counts), owner


def pages_of(slots: I64, page_size: int) -> I64:
    """`slots // page_size`, [n]; by a shift where it can be, which is several times as fast."""
    if page_size & (page_size - 1):
        return slots // page_size
    return slots >> (page_size.bit_length() - 1) if page_size > 1 else slots


def offsets_of(slots: I64, page_size: int) -> I64:
    """`slots % page_size`, [n]; without a remainder of integers, the slowest of all operations."""
    if page_size & (page_size - 1):
        return slots - slots // page_size * page_size
    return slots & (page_size - 1)


def slots_of_pages(pages: I64, page_size: int) -> I64:
    """All slots of `pages` [p], page by page, [p * page_size]."""
    if page_size == 1:
        return pages
    return (pages[:, None] * page_size + np.arange(page_size)).ravel()


def distinct(values: I64) -> I64:
    """The elements of `values` [n] sorted, each once: several times as fast as `np.unique`."""
    ordered = np.sort(values)
    return ordered[changes(ordered)]


def changes(values: I64) -> Mask:
    """True where an element differs from the one before it, and at the first one. [n]"""
    mask = np.ones(values.size, dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=mask[1:])
    return mask

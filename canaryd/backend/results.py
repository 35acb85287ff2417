"""What a burst's pieces found, put together again per work."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from canary_kernels.compare import COMPARE_FIELDS
from canary_kernels.links import LINK_FIELDS
from canary_kernels.notes import NOTE_FIELDS

from canaryd.watch.burst import I64, Burst, CompareMismatches, CopyMismatches, GroupResult, LinkMismatches, StampNotes

Rows = npt.NDArray[np.int64]
"""int64 [m, width], the item's number first."""


class _List:
    """At most `capacity` rows in item order, and how many there were."""

    def __init__(self, capacity: int, width: int) -> None:
        self._capacity = capacity
        self._rows: list[Rows] = [np.zeros((0, width), dtype=np.int64)]
        self._total = 0
        self._listed = 0

    def add(self, total: int, rows: Rows, base: int) -> None:
        self._total += total
        kept = rows[: max(0, self._capacity - self._listed)].copy()
        kept[:, 0] += base
        self._listed += kept.shape[0]
        self._rows.append(kept)

    @property
    def truncated(self) -> int:
        return self._total - self._listed

    def columns(self) -> list[I64]:
        rows = np.concatenate(self._rows)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return [np.ascontiguousarray(column) for column in rows.T]


class Results:
    """The results of one burst.

    Args:
        burst: its works.
        capacity: mismatches listed per work and kind; the rest is only counted.
    """

    def __init__(self, burst: Burst, capacity: int) -> None:
        self._works = burst.works
        self._compare = [_List(capacity, COMPARE_FIELDS) if work.compare is not None else None for work in burst.works]
        self._copies: list[CopyMismatches | None] = [None] * len(burst.works)
        self._stamps: list[_List | None] = [None] * len(burst.works)
        self._capacity = capacity
        self._links = [_List(capacity, LINK_FIELDS) if work.links is not None else None for work in burst.works]

    def add_compare(self, work: int, *, total: int, rows: Rows, base: int) -> None:
        """`total` mismatches of a piece of work number `work`, those in `rows` [m, 5] (copied) listed; `base` is added
        to their item numbers."""
        found = self._compare[work]
        if total and found is not None:
            found.add(total, rows, base)

    def add_links(self, work: int, *, total: int, rows: Rows, base: int) -> None:
        """As `add_compare`, for links: rows [m, 2]."""
        found = self._links[work]
        if total and found is not None:
            found.add(total, rows, base)

    def add_notes(self, work: int, *, total: int, rows: Rows, base: int) -> None:
        """As `add_compare`, for notes of stamps: rows [m, 2]. Without a call, none were taken."""
        noted = self._stamps[work] or _List(self._capacity, NOTE_FIELDS)
        noted.add(total, rows, base)
        self._stamps[work] = noted

    def set_copies(self, work: int, found: CopyMismatches) -> None:
        """What was found of the copies of work number `work`."""
        self._copies[work] = found

    def groups(self) -> tuple[GroupResult, ...]:
        """One result per work, in the burst's order."""
        return tuple(
            GroupResult(
                group=work.group,
                compare=_compare(self._compare[number]),
                links=_links(self._links[number]),
                stamps=_notes(self._stamps[number]),
                copies=self._copies[number],
            )
            for number, work in enumerate(self._works)
        )


def _compare(found: _List | None) -> CompareMismatches | None:
    if found is None:
        return None
    items, stored_digests, seen_digests, stored_sums, seen_sums = found.columns()
    return CompareMismatches(
        items=items,
        stored_digests=stored_digests,
        seen_digests=seen_digests,
        stored_sums=stored_sums,
        seen_sums=seen_sums,
        truncated=found.truncated,
    )


def _links(found: _List | None) -> LinkMismatches | None:
    if found is None:
        return None
    items, bits = found.columns()
    return LinkMismatches(items=items, bits=bits, truncated=found.truncated)


def _notes(found: _List | None) -> StampNotes | None:
    if found is None:
        return None
    items, bits = found.columns()
    return StampNotes(items=items, bits=bits, truncated=found.truncated)

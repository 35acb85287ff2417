"""What final sets are applied with: the op behind them, and how malformed ones are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from canaryd.watch.burst import I64
from canaryd.wire.messages import Column, End

MAX_POSITIONS = 1 << 22
"""Longest row that is tracked."""

_FAR = 1 << 40


class MalformedSets(Exception):
    """Columns that contradict each other: what the op did is not known, which is as bad as a lost message."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The op whose sets are applied. `begun_at`, `now`: when its begin and its end were applied. `begun_seq`, `seq`:
    the numbers of these messages. `lane`: the op's lane. `done`: whether it ended well. `closed`: the rows that its end
    closes. `remapped`: (group, row name) to the first page index that its end remaps. `end`: the message whose content
    is applied after its rows. `judged`: whether ledger checks may raise findings."""

    op: int
    begun_at: float
    now: float
    begun_seq: int = 0
    seq: int = 0
    lane: str = ""
    done: bool = True
    closed: frozenset[str] = frozenset()
    remapped: Mapping[tuple[int, str], int] = field(default_factory=dict)
    end: End | None = None
    judged: bool = True

    def renames(self, group: int, slot: int, page_size: int) -> bool:
        """Whether the end names new content of a slot. Raises MalformedSets."""
        if self.end is None:
            return False
        page = slot // page_size
        return (
            any(voided.group == group and page in column(voided.pages) for voided in self.end.voids)
            or any(writes.group == group and slot in column(writes.slots) for writes in self.end.writes)
            or any(copies.group == group and slot in column(copies.destinations) for copies in self.end.copies)
        )


def column(data: Column) -> I64:
    """A wire column as a read-only int64 array [n]. Raises MalformedSets if its bytes are not whole elements."""
    try:
        return np.frombuffer(data, dtype="<i8")
    except ValueError as error:
        raise MalformedSets("a column is not a whole number of elements") from error


def bounded(numbers: I64) -> I64:
    """Slot or page numbers as named, cut to what can be multiplied by a page size: for reports only."""
    return np.clip(numbers, -_FAR, _FAR)

"""Monotonic totals of one watch. Every reason is listed beforehand, so that each series exists from the start."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt


class Check(StrEnum):
    """What a finding says is wrong; label of `canaryd_mismatches_total`."""

    CONTENT = "content"
    CHAIN = "chain"
    TOKEN = "token"  # noqa: S105 - a token of a prompt
    POSITION = "position"
    OWNER = "owner"
    LIFETIME = "lifetime"
    LANDED = "landed"
    RANGE = "range"
    NONFINITE = "nonfinite"
    COPY = "copy"
    INPUT = "input"


class Dismissal(StrEnum):
    """Why a suspect did not become a finding.

    generation: a named write came before the burst could be judged. scope: an open scoped op covers the slot. freed:
    its page was freed. row_changed: the row was changed or closed. gap: messages were lost. not_reproduced: the second
    read was clean. unconfirmed: a legal write came before the second read. superseded: the slot already has a finding
    or a suspect. limit: too many at once. lost: the backend failed.
    """

    GENERATION = "generation"
    SCOPE = "scope"
    FREED = "freed"
    ROW_CHANGED = "row_changed"
    GAP = "gap"
    NOT_REPRODUCED = "not_reproduced"
    UNCONFIRMED = "unconfirmed"
    SUPERSEDED = "superseded"
    LIMIT = "limit"
    LOST = "lost"


class StampDrop(StrEnum):
    """Why a provisional stamp did not become final (the slot is stamped again if its content still counts)."""

    GENERATION = "generation"
    SCOPE = "scope"
    FREED = "freed"
    GAP = "gap"
    LOST = "lost"


class VerifyMode(StrEnum):
    """How a slot was looked at. live, idle, doubt and second_read read its content; links reads its stamp only."""

    LIVE = "live"
    IDLE = "idle"
    DOUBT = "doubt"
    SECOND_READ = "second_read"
    LINKS = "links"


class Skip(StrEnum):
    """Why a slot's content was never guarded.

    freed, voided, rewritten: before its stamp was final. gap: written, not stamped when messages were lost. forgotten:
    stamped, but neither in a row nor cached in the snapshot. unknown_prefix: a row opened on it or moved to it, and no
    write of it is known. stalled: an op that may write it is open for too long.
    """

    FREED = "freed"
    VOIDED = "voided"
    REWRITTEN = "rewritten"
    GAP = "gap"
    FORGOTTEN = "forgotten"
    UNKNOWN_PREFIX = "unknown_prefix"
    STALLED = "stalled"


class Rebless(StrEnum):
    """Why bytes were stamped that nobody vouched for: found at attach, after a gap, or on a page that came back."""

    ATTACH = "attach"
    GAP = "gap"
    REVIVED = "revived"


class Oddity(StrEnum):
    """Messages that contradict what is known; they are applied as far as they make sense, and counted."""

    UNKNOWN_OP = "unknown_op"
    DUPLICATE_OP = "duplicate_op"
    UNKNOWN_ROW = "unknown_row"
    DUPLICATE_ROW = "duplicate_row"
    UNKNOWN_GROUP = "unknown_group"
    BAD_COLUMN = "bad_column"
    BAD_PAGE = "bad_page"
    FREES_NOT_PROMISED = "frees_not_promised"
    UNASKED_SNAPSHOT = "unasked_snapshot"
    ROW_LIMIT = "row_limit"
    OP_LIMIT = "op_limit"
    STALLED_OP = "stalled_op"
    COPY_LIMIT = "copy_limit"
    TRUNCATED = "truncated"


class Histogram:
    """Observations in fixed buckets. `counts[i]` are those <= bounds[i] and above the bound before; the last is open.

    Args:
        bounds: upper bounds in seconds, rising.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one observation."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += max(0.0, seconds)

    def observe_all(self, seconds: npt.NDArray[np.float64]) -> None:
        """Adds each element of a float64 array [n]."""
        if not seconds.size:
            return
        seconds = np.maximum(seconds, 0.0)
        places = np.searchsorted(self.bounds, seconds, side="left")
        for place, count in zip(*np.unique(places, return_counts=True), strict=True):
            self.counts[int(place)] += int(count)
        self.sum += math.fsum(seconds)


Label = TypeVar("Label", bound=StrEnum)


def _zeros(labels: Iterable[Label]) -> dict[Label, int]:
    return dict.fromkeys(labels, 0)


class Counters:
    """Totals since the watch began. Slots unless the name says otherwise."""

    def __init__(self) -> None:
        self.mismatches = _zeros(Check)
        self.suspects = 0
        self.dismissed = _zeros(Dismissal)
        self.stamped = 0
        self.stamps_dropped = _zeros(StampDrop)
        self.verified = _zeros(VerifyMode)
        self.bytes_verified = 0
        self.skipped = _zeros(Skip)
        self.reblessed = _zeros(Rebless)
        self.oddities = _zeros(Oddity)
        self.gaps = 0
        self.snapshots = 0
        self.findings = 0
        self.freed = 0
        self.unguarded_seconds = Histogram((0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0))
        self.stamp_lag_seconds = Histogram((0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0))

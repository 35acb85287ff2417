"""Findings: the only thing that counts as corruption."""

from __future__ import annotations

import msgspec

from canaryd.watch.counters import Check

MAX_RANGES = 16
"""Slot ranges and pages that one finding lists; `slot_count` is exact."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One confirmed fault: one check on one page, or, past the limit per burst, on several pages joined.

    Holds no token ids, no KV bytes and no handles. `slots` are inclusive [first, last] ranges, at most `MAX_RANGES`, of
    the `slot_count` slots; slots out of the group appear as the message named them. `position` is the first slot's
    position in `row`, -1 unknown; `row` is "" where no open row holds it. `op` wrote the first slot last, `op_age`
    seconds before `confirmed`; -1 unknown. Times are the caller's clock. The digests and sums (int64, as stored and
    as seen) are the first slot's for `content`, else 0.
    """

    check: Check
    group: str
    slots: list[tuple[int, int]]
    slot_count: int
    pages: list[int]
    position: int
    row: str
    live: bool
    op: int
    op_age: float
    classification: str
    first_seen: float
    confirmed: float
    burst: int
    detail: str = ""
    stored_digest: int = 0
    seen_digest: int = 0
    stored_sum: int = 0
    seen_sum: int = 0

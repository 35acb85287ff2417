"""What the core can be asked: gauges of the whole, and what is known of one slot."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class SlotState(IntEnum):
    """Where a slot stands. Its name in lower case is the label of `canaryd_slots{state}`.

    UNKNOWN: nothing is known of it. VOID: handed out, content undefined. PENDING: written, to be stamped.
    PROVISIONAL: stamped, not final yet. SETTLED: guarded. SUSPECT: mismatched once. DAMAGED: has a finding. FREED: its
    page was freed. DOUBT: stamped, but messages were lost since. RESERVED: never owned, never stamped.
    """

    UNKNOWN = 0
    VOID = 1
    PENDING = 2
    PROVISIONAL = 3
    SETTLED = 4
    SUSPECT = 5
    DAMAGED = 6
    FREED = 7
    DOUBT = 8
    RESERVED = 9

    @property
    def label(self) -> str:
        """Name in lower case."""
        return self.name.lower()


class SlotReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one slot. Times are the caller's clock, None if it never happened; `rows` = open rows that
    hold its page. `guarded`: a change of its bytes now would be found."""

    group: str
    slot: int
    page: int
    state: str
    generation: int
    guarded: bool
    last_verified: float | None
    last_op: int | None
    last_write: float | None
    rows: int


class WatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges at one moment. Times are the caller's clock.

    `slots` by state, all groups. `oldest_unverified`: when the slot that was longest not looked at was last verified
    (None: nothing is guarded); `oldest_live` the same among slots of open rows. `pass_coverage`: share (0 to 1) of the
    guarded slots looked at since `pass_started`; the last complete pass took `pass_seconds` over `pass_slots` slots.
    `unguarded_ratio`: share of the slots with content that counts whose change would not be found now.
    `nonfinite_reserved`: reserved slots that held NaN or infinity when last scanned.
    """

    slots: dict[str, int]
    oldest_unverified: float | None
    oldest_live: float | None
    pass_coverage: float
    pass_started: float | None
    pass_completed: float | None
    pass_seconds: float | None
    pass_slots: int
    open_rows: int
    open_ops: int
    stalled_ops: list[int]
    oldest_op_age: float
    provisional_bursts: int
    open_suspects: int
    pending_stamps: int
    unguarded_ratio: float
    nonfinite_reserved: int
    in_gap: bool
    applied_seq: int

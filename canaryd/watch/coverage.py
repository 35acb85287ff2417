"""What was looked at, and how long ago: states, ages and passes over all groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canaryd.watch.columns import Mask
from canaryd.watch.group import Group
from canaryd.watch.report import SlotReport, SlotState

GUARDED = (SlotState.SETTLED, SlotState.SUSPECT)
_UPDATE_SECONDS = 1.0
_IS_GUARDED = np.zeros(len(SlotState), dtype=np.bool_)
_IS_GUARDED[list(GUARDED)] = True


class Coverage:
    """Follows passes: a pass is complete when every guarded slot was looked at since it started.

    Args:
        groups: state of each group.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.share = 0.0
        self.started_at: float | None = None
        self.completed_at: float | None = None
        self.completed_seconds: float | None = None
        self.completed_slots = 0
        self._updated_at = -np.inf

    def update(self, now: float) -> None:
        """Recounts, at most once a second."""
        if now - self._updated_at < _UPDATE_SECONDS:
            return
        self._updated_at = now
        guarded = seen = 0
        if self.started_at is None:
            self.started_at = now
        for group in self._groups:
            mask = _IS_GUARDED[group.ledger.state]
            guarded += int(np.count_nonzero(mask))
            seen += int(np.count_nonzero(mask & (group.ledger.verified_at >= self.started_at)))
        self.share = seen / guarded if guarded else 0.0
        if guarded and seen == guarded:
            self.completed_at = now
            self.completed_seconds = now - self.started_at
            self.completed_slots = seen
            self.started_at = now

    def by_state(self) -> dict[str, int]:
        """Slots by state label."""
        counts = np.zeros(len(SlotState), dtype=np.int64)
        for group in self._groups:
            counts += np.bincount(group.ledger.state, minlength=len(SlotState))
        return {state.label: int(counts[state]) for state in SlotState}

    @staticmethod
    def unguarded(slots: dict[str, int]) -> float:
        """Share of the slots with content that counts whose change would not be found now."""
        open_states = (SlotState.PENDING, SlotState.PROVISIONAL, SlotState.DOUBT, SlotState.DAMAGED)
        unguarded = sum(slots[state.label] for state in open_states)
        guarded = sum(slots[state.label] for state in GUARDED)
        return unguarded / (guarded + unguarded) if guarded + unguarded else 0.0

    def oldest(self, *, live_only: bool) -> float | None:
        """When the guarded slot that was longest not looked at was last verified."""
        oldest = [
            float(group.ledger.verified_at[mask].min())
            for group in self._groups
            if (mask := self._mask(group, live_only)).any()
        ]
        return min(oldest, default=None)

    @staticmethod
    def _mask(group: Group, live_only: bool) -> Mask:
        mask: Mask = _IS_GUARDED[group.ledger.state]
        return mask & np.repeat(group.rows.holders > 0, group.page_size) if live_only else mask

    @staticmethod
    def explain(group: Group, slot: int, *, in_gap: bool) -> SlotReport:
        """What is known of one slot that exists."""
        ledger, page = group.ledger, slot // group.page_size
        state = SlotState(int(ledger.state[slot]))
        verified, written = float(ledger.verified_at[slot]), float(ledger.ended_at[slot])
        op = int(ledger.last_op[slot])
        return SlotReport(
            group=group.name,
            slot=slot,
            page=page,
            state=state.label,
            generation=int(ledger.generation[slot]),
            guarded=state in GUARDED and not in_gap and not ledger.covered[page],
            last_verified=verified if np.isfinite(verified) else None,
            last_op=op if op >= 0 else None,
            last_write=written if np.isfinite(written) else None,
            rows=int(group.rows.holders[page]),
        )

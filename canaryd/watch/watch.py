"""The facade of the pure core: events and `now` in, bursts and findings out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from canaryd.watch.burst import Burst, BurstResult
from canaryd.watch.counters import Counters
from canaryd.watch.findings import Finding
from canaryd.watch.policy import Policy
from canaryd.watch.report import SlotReport, SlotState, WatchReport
from canaryd.wire.messages import Attach, Begin, End, Snapshot


class Watch:
    """One attachment's watch. No socket, no clock, no GPU; not thread-safe.

    Args:
        attach: the attach message, already validated.
        policy: pace and limits.
        scheme: fingerprint scheme of the attachment.
        chain_key: secret key of the native chain, unsigned 64-bit (0 in tests).
        slot_bytes: bytes of one slot in all regions, per group.
    """

    def __init__(
        self,
        attach: Attach,
        *,
        policy: Policy,
        scheme: Literal["native", "sglang"],
        chain_key: int,
        slot_bytes: Sequence[int],
    ) -> None:
        self.counters = Counters()
        self._attach = attach
        self._resync: str | None = "attach"

    def apply(self, seq: int, message: Begin | End | Snapshot, now: float) -> None:
        """Applies stream message number `seq`. A hole in the numbers is a gap."""

    def on_gap(self, now: float) -> None:
        """Messages were lost: drops what is provisional, doubts what is stamped, asks for a snapshot."""

    def next_burst(self, now: float) -> Burst | None:
        """The work to run now, or None. At most one burst is outstanding until `on_burst_done` or `on_burst_lost`."""
        return None

    def on_burst_done(self, result: BurstResult, announced: int, now: float) -> None:
        """The outstanding burst ran; `announced` was read from the announce page after its device work completed."""

    def on_burst_lost(self, now: float) -> None:
        """The backend failed: everything of the outstanding burst is dropped and counted."""

    def next_due(self, now: float) -> float | None:
        """When a second read is due, or None; call `next_burst` then, ahead of the tick."""
        return None

    def take_findings(self) -> list[Finding]:
        """Findings since the last call."""
        return []

    def take_resync(self) -> str | None:
        """Cause for which a snapshot must be asked for, once, or None."""
        cause, self._resync = self._resync, None
        return cause

    def report(self, now: float) -> WatchReport:
        """Gauges."""
        return WatchReport(
            slots={state.label: 0 for state in SlotState},
            oldest_unverified=None,
            oldest_live=None,
            pass_coverage=0.0,
            pass_started=None,
            pass_completed=None,
            open_rows=0,
            open_ops=0,
            stalled_ops=[],
            oldest_op_age=0.0,
            provisional_bursts=0,
            open_suspects=0,
            pending_stamps=0,
            unguarded_ratio=0.0,
            in_gap=True,
            applied_seq=0,
        )

    def explain(self, group: int, slot: int, now: float) -> SlotReport:
        """What is known of one slot. Raises ValueError for a slot that does not exist."""
        return SlotReport(
            group=self._attach.groups[group].name,
            slot=slot,
            page=slot // self._attach.groups[group].page_size,
            state=SlotState.UNKNOWN.label,
            generation=0,
            guarded=False,
            last_verified=None,
            last_op=None,
            last_write=None,
            rows=0,
        )

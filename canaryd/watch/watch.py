"""The facade of the pure core: events and `now` in, bursts and findings out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np

from canaryd.watch.burst import I64, Burst, BurstResult
from canaryd.watch.cause import Cause, MalformedSets
from canaryd.watch.counters import Counters, Dismissal, Oddity, Rebless, Skip, StampDrop
from canaryd.watch.coverage import Coverage
from canaryd.watch.final_sets import FinalSets
from canaryd.watch.findings import Finding, FindingLog
from canaryd.watch.group import Group
from canaryd.watch.judge import Judge
from canaryd.watch.launched import LaunchedBurst
from canaryd.watch.ops import OpenOp, OpenOps
from canaryd.watch.planner import Planner
from canaryd.watch.policy import Policy
from canaryd.watch.report import SlotReport, WatchReport
from canaryd.watch.resync import adopt_snapshot
from canaryd.watch.suspects import SuspectList
from canaryd.wire.messages import Attach, Begin, End, Snapshot


class Watch:
    """One attachment's watch. No socket, no clock, no GPU; not thread-safe.

    Args:
        attach: the attach message, already validated.
        policy: pace and limits.
        scheme: fingerprint scheme of the attachment.
        chain_key: secret key of the native chain, any 64-bit integer (0 in tests).
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
        self._policy = policy
        self._frees = attach.frees
        self._log = FindingLog(self.counters, policy.max_findings_per_burst)
        self._groups = [
            Group(number, spec, slot_bytes=size, scheme=scheme, chain_key=chain_key, counters=self.counters)
            for number, (spec, size) in enumerate(zip(attach.groups, slot_bytes, strict=True))
        ]
        private = attach.frees and attach.tiers == "none"
        self._sets = [
            FinalSets(group, self.counters, self._log, max_rows=policy.max_rows, private=private)
            for group in self._groups
        ]
        self._ops = OpenOps()
        self._suspects = SuspectList(policy.max_suspects)
        self._planner = Planner(self._groups, policy, self._suspects, self.counters)
        self._judge = Judge(
            self._groups,
            self._planner.walks,
            policy=policy,
            suspects=self._suspects,
            counters=self.counters,
            log=self._log,
        )
        self._coverage = Coverage(self._groups)
        self._outstanding: LaunchedBurst | None = None
        self._provisional: deque[LaunchedBurst] = deque()
        self._applied = 0
        self._in_gap = True
        self._cause = Rebless.ATTACH
        self._resync: str | None = Rebless.ATTACH.value
        self._resync_asked_at: float | None = None

    # --- the stream ---------------------------------------------------------------------------------------------------

    def apply(self, seq: int, message: Begin | End | Snapshot, now: float) -> None:
        """Applies stream message number `seq`. A hole in the numbers is a gap."""
        if self._applied and seq != self._applied + 1:
            self.on_gap(now)
        self._applied = seq
        if isinstance(message, Snapshot):
            self._snapshot(message, now)
        elif self._in_gap:
            return
        elif isinstance(message, Begin):
            self._begin(message, now, seq)
        else:
            try:
                self._end(message, now, seq)
            except MalformedSets:
                self.counters.oddities[Oddity.BAD_COLUMN] += 1
                self.on_gap(now)
        self._judge_ready(now)

    def on_gap(self, now: float) -> None:
        """Messages were lost: drops what is provisional, doubts what is stamped, asks for a snapshot."""
        if not self._in_gap:
            self.counters.gaps += 1
            self._cause = Rebless.GAP
            self._forget()
        elif self._resync_asked_at is not None:
            # A snapshot is on its way, or was lost too: each costs the engine, so the next is asked for in its time.
            self._ask_again(now)
            return
        self._in_gap = True
        self._resync = self._cause.value
        self._resync_asked_at = now

    def _forget(self) -> None:
        lost = [*self._provisional]
        if self._outstanding is not None and not self._outstanding.dropped:
            self._outstanding.dropped = True
            lost.append(self._outstanding)
        for burst in lost:
            for part in burst.parts:
                self.counters.stamps_dropped[StampDrop.GAP] += part.stamps.size if part.stamps else 0
        self._provisional.clear()
        self.counters.dismissed[Dismissal.GAP] += self._suspects.clear()
        self._ops.clear()
        for group, sets in zip(self._groups, self._sets, strict=True):
            sets.forget()
            group.ledger.doubt_all()

    def _snapshot(self, message: Snapshot, now: float) -> None:
        if not self._in_gap:
            self.counters.oddities[Oddity.UNASKED_SNAPSHOT] += 1
            self._cause = Rebless.GAP
            self._forget()
        self.counters.snapshots += 1
        self._in_gap = False
        self._resync = None
        self._log.start(now)
        cause = Cause(op=-1, begun_at=now, now=now, judged=False)
        try:
            # Ops of a snapshot began before everything that can still be announced.
            for begin in message.open_ops:
                self._begin(begin, now, 0)
            if self._in_gap:
                return  # more open ops than can be remembered
            adopt_snapshot(
                message, self._groups, self._sets, counters=self.counters, cause=cause, why=self._cause, ops=self._ops
            )
        except MalformedSets:
            self.counters.oddities[Oddity.BAD_COLUMN] += 1
            self._forget()
            self.on_gap(now)
        self._planner.forget_pace()

    def _begin(self, message: Begin, now: float, seq: int) -> None:
        known = self._ops.end(message.op)
        if known is not None:
            self.counters.oddities[Oddity.DUPLICATE_OP] += 1
            self._uncover(known)
            seq = min(seq, known.begun_seq)
        if len(self._ops) >= self._policy.max_open_ops:
            # Without a place to remember the op nothing can be judged: as bad as a lost message.
            self.counters.oddities[Oddity.OP_LIMIT] += 1
            self.on_gap(now)
            return
        scope: dict[int, I64] | None = None
        if message.scope is not None and known is None:
            scope = {}
            for pages in message.scope:
                if not 0 <= pages.group < len(self._groups):
                    self.counters.oddities[Oddity.UNKNOWN_GROUP] += 1
                    continue
                named = self._sets[pages.group].existing(pages.pages)
                scope[pages.group] = np.union1d(scope[pages.group], named) if pages.group in scope else named
            for number, covered in scope.items():
                self._groups[number].ledger.cover(covered, 1)
        self._ops.begin(OpenOp(op=message.op, begun_seq=seq, begun_at=now, scope=scope, lane=message.lane))

    def _uncover(self, op: OpenOp) -> None:
        for number, covered in (op.scope or {}).items():
            self._groups[number].ledger.cover(covered, -1)

    def _end(self, message: End, now: float, seq: int) -> None:
        op = self._ops.end(message.op)
        if op is None:
            self.counters.oddities[Oddity.UNKNOWN_OP] += 1
        else:
            self._uncover(op)
        remapped: dict[tuple[int, str], int] = {}
        for remap in message.remaps:
            key = (remap.group, remap.row)
            remapped[key] = min(remap.start, remapped.get(key, remap.start))
        cause = Cause(
            op=message.op,
            begun_at=op.begun_at if op else now,
            now=now,
            begun_seq=op.begun_seq if op else 0,
            seq=seq,
            lane=op.lane if op else "",
            done=message.status == "done",
            closed=frozenset(message.closed),
            remapped=remapped,
            end=message,
        )
        self._log.start(now)
        self._end_rows(message, cause)
        self._end_content(message, cause)
        for sets in self._sets:
            sets.judge_prefixes(self._ops, cause)

    def _end_rows(self, message: End, cause: Cause) -> None:
        for group in self._groups:
            group.rows.seq = cause.seq
        for name in message.closed:
            if not [True for sets in self._sets if sets.close_row(name)]:
                self.counters.oddities[Oddity.UNKNOWN_ROW] += 1
        for opened in message.opened:
            if sets := self._sets_of(opened.group):
                sets.open_row(opened, cause)
        for remap in message.remaps:
            if sets := self._sets_of(remap.group):
                sets.remap(remap.row, remap.start, remap.pages, cause)
        for sets in self._sets:
            sets.judge_claims(cause)

    def _end_content(self, message: End, cause: Cause) -> None:
        for voided in message.voids:
            if sets := self._sets_of(voided.group):
                sets.void(voided.pages, cause)
        for writes in message.writes:
            if sets := self._sets_of(writes.group):
                sets.writes.apply(writes, cause)
        for copies in message.copies:
            if sets := self._sets_of(copies.group):
                sets.copy(copies, cause)
        if not self._frees:
            self.counters.oddities[Oddity.FREES_NOT_PROMISED] += len(message.freed)
            return
        for freed in message.freed:
            if sets := self._sets_of(freed.group):
                sets.free(freed.pages, cause, self._ops)

    def _sets_of(self, group: int) -> FinalSets | None:
        if 0 <= group < len(self._sets):
            return self._sets[group]
        self.counters.oddities[Oddity.UNKNOWN_GROUP] += 1
        return None

    # --- bursts -------------------------------------------------------------------------------------------------------

    def next_burst(self, now: float) -> Burst | None:
        """The work to run now, or None. At most one burst is outstanding until `on_burst_done` or `on_burst_lost`."""
        self._note_stalls(now)
        if self._in_gap:
            self._ask_again(now)
            return None
        if self._outstanding is not None or len(self._provisional) >= self._policy.max_provisional_bursts:
            return None
        planned = self._planner.plan(now)
        if planned is None:
            return None
        burst, self._outstanding = planned
        return burst

    def on_burst_done(self, result: BurstResult, announced: int, now: float) -> None:
        """The outstanding burst ran; `announced` was read from the announce page after its device work completed.

        Raises ValueError if `result` is not that of the outstanding burst.
        """
        burst = self._take_outstanding(result.number)
        if burst.dropped:
            return
        burst.result = result
        burst.read_at = now
        # A page that lags behind the stream cannot be right: what was applied had been announced.
        burst.announced = max(announced, self._applied)
        self._provisional.append(burst)
        self._judge_ready(now)
        self._coverage.update(now)

    def on_burst_lost(self, now: float) -> None:
        """The backend failed: everything of the outstanding burst is dropped and counted."""
        if self._outstanding is None:
            raise ValueError("no burst is outstanding")
        burst = self._take_outstanding(self._outstanding.number)
        if not burst.dropped:
            self._judge.unused(burst, StampDrop.LOST, Dismissal.LOST)

    def _take_outstanding(self, number: int) -> LaunchedBurst:
        burst = self._outstanding
        if burst is None or burst.number != number:
            raise ValueError(f"burst {number} is not outstanding")
        self._outstanding = None
        return burst

    def _judge_ready(self, now: float) -> None:
        """Judges provisional bursts, oldest first, that the stream has caught up with."""
        while self._provisional and self._is_ready(self._provisional[0]):
            self._judge.judge(self._provisional.popleft(), now)

    def _is_ready(self, burst: LaunchedBurst) -> bool:
        """Every op that could have written while the burst read is known and over."""
        return self._applied >= burst.announced and not self._ops.hold_back(burst.announced)

    def next_due(self, now: float) -> float | None:
        """When a second read is due, or None; call `next_burst` then, ahead of the tick."""
        due = self._suspects.next_due()
        return None if due is None else max(due, now)

    def _ask_again(self, now: float) -> None:
        if self._resync_asked_at is None:
            self._resync_asked_at = now
        elif now - self._resync_asked_at > self._policy.resync_retry_seconds:
            self._resync = self._cause.value
            self._resync_asked_at = now

    def _note_stalls(self, now: float) -> None:
        for op in self._ops.newly_stalled(now - self._policy.op_stall_seconds):
            self.counters.oddities[Oddity.STALLED_OP] += 1
            for group in self._groups:
                pages = None if op.scope is None else op.scope.get(group.number, np.zeros(0, dtype=np.int64))
                self.counters.skipped[Skip.STALLED] += group.ledger.guarded_in(pages)

    # --- what came out ------------------------------------------------------------------------------------------------

    def take_findings(self) -> list[Finding]:
        """Findings since the last call."""
        return self._log.take()

    def take_resync(self) -> str | None:
        """Cause for which a snapshot must be asked for, once, or None."""
        cause, self._resync = self._resync, None
        return cause

    def report(self, now: float) -> WatchReport:
        """Gauges."""
        coverage = self._coverage
        coverage.update(now)
        slots = coverage.by_state()
        return WatchReport(
            slots=slots,
            oldest_unverified=coverage.oldest(live_only=False),
            oldest_live=coverage.oldest(live_only=True),
            pass_coverage=coverage.share,
            pass_started=coverage.started_at,
            pass_completed=coverage.completed_at,
            pass_seconds=coverage.completed_seconds,
            pass_slots=coverage.completed_slots,
            open_rows=sum(len(group.rows) for group in self._groups),
            open_ops=len(self._ops),
            stalled_ops=self._ops.stalled,
            oldest_op_age=self._ops.oldest_age(now),
            provisional_bursts=len(self._provisional),
            open_suspects=self._suspects.count,
            pending_stamps=slots["pending"] + slots["provisional"],
            unguarded_ratio=coverage.unguarded(slots),
            nonfinite_reserved=sum(int(np.count_nonzero(group.ledger.nonfinite_reserved)) for group in self._groups),
            in_gap=self._in_gap,
            applied_seq=self._applied,
        )

    @property
    def groups(self) -> Sequence[Group]:
        """State of each group, to be read only."""
        return tuple(self._groups)

    def explain(self, group: int, slot: int, now: float) -> SlotReport:
        """What is known of one slot. Raises ValueError for a slot that does not exist."""
        del now
        if not 0 <= group < len(self._groups) or not 0 <= slot < self._groups[group].num_slots:
            raise ValueError(f"no slot {slot} in group {group}")
        return self._coverage.explain(self._groups[group], slot, in_gap=self._in_gap)

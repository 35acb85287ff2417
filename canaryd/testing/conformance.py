"""A client that takes the place of the real one and believes nothing that an adapter tells it.

It compares what ops name with the bytes that changed, and lets the daemon's own core judge the facts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from canaryd.client.facts import Final, SnapshotState, Status, end_message
from canaryd.client.ops import Event, FinalSource, begin_message
from canaryd.errors import WireError
from canaryd.testing.pool_bytes import PoolBytes, Read
from canaryd.watch.cause import column
from canaryd.watch.counters import Oddity
from canaryd.watch.policy import Policy
from canaryd.watch.watch import Watch
from canaryd.wire.messages import Attach, Begin, End, Finding, GroupSpec, Identity, PageSet, RowOpen, Snapshot
from canaryd.wire.validate import validate

Kind = Literal["outside", "unnamed", "open", "facts", "snapshot", "message"]

_CONTRADICTIONS = (
    Oddity.UNKNOWN_OP,
    Oddity.DUPLICATE_OP,
    Oddity.UNKNOWN_ROW,
    Oddity.DUPLICATE_ROW,
    Oddity.UNKNOWN_GROUP,
    Oddity.BAD_COLUMN,
    Oddity.BAD_PAGE,
    Oddity.FREES_NOT_PROMISED,
    Oddity.OP_LIMIT,
)


class Violation(NamedTuple):
    """One breach of the contract. `op`: the op that was begun or ended last, 0 before the first.

    Kinds: "outside": bytes changed while no op was open; "unnamed": bytes changed that no op named; "open": an op
    never ended; "facts": facts that contradict each other; "snapshot": a snapshot that contradicts the facts;
    "message": what was told cannot be sent.
    """

    kind: Kind
    op: int
    text: str


class ConformanceClient:
    """Has the interface of `canaryd.client.Client`; not thread-safe: the engine calls it from one thread.

    Args:
        groups, snapshot, frees, tiers: as for `Client`.
        read: reads the pool's memories. The pool must be host memory, and small: each op reads all of it.
        snapshot_every: a snapshot is asked for and compared at each so many begins.
        description: what else a `Client` is given; not looked at.
    """

    def __init__(
        self,
        *,
        groups: Sequence[GroupSpec],
        read: Read,
        snapshot: Callable[[], SnapshotState],
        frees: bool = False,
        tiers: Literal["none", "announced", "opaque"] = "opaque",
        snapshot_every: int = 4,
        **description: Any,
    ) -> None:
        del description
        self.violations: list[Violation] = []
        self.ops = 0
        """Ops begun so far."""
        self._groups = list(groups)
        self._snapshot = snapshot
        self._snapshot_every = snapshot_every
        self._open: dict[int, str] = {}
        self._pending: dict[str, deque[tuple[int, tuple[Event, ...], FinalSource, Status]]] = {}
        self._number = 0
        self._farewell = 0
        self._oddities = dict.fromkeys(_CONTRADICTIONS, 0)
        attach = Attach(
            identity=Identity(engine="conformance"),
            engine_kind="conformance",
            engine_version="",
            client_version="",
            memories=[],
            groups=self._groups,
            frees=frees,
            tiers=tiers,
        )
        slot_bytes = [sum(region.pieces * region.piece_bytes for region in group.regions) for group in self._groups]
        self._watch = Watch(attach, policy=Policy(), scheme="native", chain_key=0, slot_bytes=slot_bytes)
        self._bytes = PoolBytes(self._groups, read)

    # --- the client's interface -------------------------------------------------------------------------------------

    def start(self) -> None:
        """As `Client.start`; there is no thread."""

    def begin(self, lane: str = "main", scope: Sequence[PageSet] | None = None) -> int:
        """As `Client.begin`."""
        self.poll()
        if not self._open:
            self._bytes.look()
            for text in self._bytes.take_unexplained():
                self._complain("outside", f"{text} changed while no op was open")
        if self.ops % self._snapshot_every == 0:
            self._look_at_snapshot()
        self.ops += 1
        self._open[self.ops] = lane
        self._farewell = self.ops
        self._send(begin_message(self.ops, lane, None if scope is None else list(scope)))
        return self.ops

    def end(self, op: int, status: Status = "done", final: Final | None = None) -> None:
        """As `Client.end`."""
        self.end_after(op, (), final, status)

    def end_after(self, op: int, events: Sequence[Event], final: FinalSource = None, status: Status = "done") -> None:
        """As `Client.end_after`; events are polled at each call and by `poll`."""
        self._farewell = 0
        lane = self._open.get(op)
        if lane is None:
            self._complain("facts", f"op {op} is ended and is not open")
            return
        self._pending.setdefault(lane, deque()).append((op, tuple(events), final, status))
        self.poll()

    def open_ops(self) -> frozenset[int]:
        """As `Client.open_ops`."""
        return frozenset(self._open)

    def poll_findings(self) -> list[Finding]:
        """As `Client.poll_findings`; nothing is found here."""
        return []

    def close(self) -> None:
        """Ends the run: whatever is still open never ended, except an op that begins with the last call before this
        one. It is the way to take leave of a pool that will be used for something else."""
        self.poll()
        for op in self._open:
            if op != self._farewell:
                self._complain("open", f"op {op} was begun and never ended")
        self._open.clear()

    # --- what it looks at -------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Takes the ends whose events are done, each lane in its order."""
        for waiting in list(self._pending.values()):
            while waiting and all(event.query() for event in waiting[0][1]):
                op, _, final, status = waiting.popleft()
                self._end(op, status, final() if callable(final) else final)

    def _end(self, op: int, status: Status, final: Final | None) -> None:
        self._open.pop(op, None)
        final = final or Final()
        try:
            if final.problem is not None:
                raise final.problem
            message = end_message(op, status, final.facts)
            validate(message)
        except (WireError, TypeError, ValueError, OverflowError) as error:
            self._complain("message", f"the end of op {op} cannot be told: {error}")
            return
        self._bytes.look()
        for voided in message.voids:
            self._bytes.explain_pages(voided.group, column(voided.pages))
        for writes in message.writes:
            self._bytes.explain(writes.group, column(writes.slots))
        for copies in message.copies:
            self._bytes.explain(copies.group, column(copies.destinations))
        if not self._open:
            for text in self._bytes.take_unexplained():
                self._complain("unnamed", f"{text} changed and were not named by the ops up to {op}")
        self._send(message)

    def _send(self, message: Begin | End | Snapshot) -> None:
        """The core judges what the stream says."""
        self._number += 1
        self._watch.apply(self._number, message, float(self._number))
        for finding in self._watch.take_findings():
            where = f"group {finding.group!r}, slots {finding.slots}, row {finding.row!r}, position {finding.position}"
            self._complain("facts", f"{finding.check.value}: {finding.detail}; {where}")
        for oddity, before in self._oddities.items():
            count = self._watch.counters.oddities[oddity]
            if count > before:
                self._oddities[oddity] = count
                self._complain("facts", f"{oddity.value}, {count - before} times")

    def _look_at_snapshot(self) -> None:
        """The first snapshot says what the engine holds already; the later ones must agree with the facts."""
        state = self._snapshot()
        if self._number == 0:
            self._send(Snapshot(open_ops=[], rows=state.rows, cached=state.cached))
            return
        told: dict[tuple[int, str], RowOpen] = {(row.group, row.row): row for row in state.rows}
        for number, group in enumerate(self._watch.groups):
            table = group.rows
            for name in table.index.keys() - {row for of, row in told if of == number}:
                self._complain("snapshot", f"row {name!r} of group {group.name!r} is open and not in the snapshot")
            for (of, name), row in told.items():
                if of != number:
                    continue
                index = table.index.get(name)
                if index is None:
                    self._complain("snapshot", f"row {name!r} of group {group.name!r} was never opened, or is closed")
                elif row.length != table.length[index]:
                    length = int(table.length[index])
                    self._complain("snapshot", f"row {name!r} has {row.length} tokens, {length} were told of")
                elif not _same_pages(column(row.pages), table.pages_of(index), row.length, group.page_size, group.ring):
                    self._complain("snapshot", f"row {name!r} holds other pages than were told of")

    def _complain(self, kind: Kind, text: str) -> None:
        self.violations.append(Violation(kind, self.ops, text))


def _same_pages(snapshot: Any, told: Any, length: int, page_size: int, ring: int) -> bool:
    """Whether two page lists agree where tokens were written."""
    used = -(-min(length, ring or length) // page_size)
    return bool((snapshot[:used].tolist()) == told[:used].tolist())

"""Open ops: what may be writing the pool now, and whether a burst can be judged yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from canaryd.watch.burst import I64


@dataclass
class OpenOp:
    """One op between begin and end. `scope` None: it may write anywhere; else unique pages in range per group."""

    op: int
    begun_seq: int
    begun_at: float
    scope: dict[int, I64] | None
    lane: str = ""
    stalled: bool = field(default=False)


class OpenOps:
    """All open ops of one attachment."""

    def __init__(self) -> None:
        self._ops: dict[int, OpenOp] = {}

    def __len__(self) -> int:
        return len(self._ops)

    def begin(self, op: OpenOp) -> None:
        """An op may write from here on."""
        self._ops[op.op] = op

    def end(self, op: int) -> OpenOp | None:
        """The op ended; None if it was not open."""
        return self._ops.pop(op, None)

    def clear(self) -> None:
        """Forgets all ops."""
        self._ops.clear()

    def hold_back(self, announced: int) -> bool:
        """Whether an unscoped op that began at or before `announced` is still open."""
        return any(op.scope is None and op.begun_seq <= announced for op in self._ops.values())

    def any_since(self, seq: int) -> bool:
        """Whether an op that began at or before message `seq` is still open."""
        return any(op.begun_seq <= seq for op in self._ops.values())

    def scoped(self) -> list[OpenOp]:
        """Open ops with a scope."""
        return [op for op in self._ops.values() if op.scope is not None]

    def newly_stalled(self, older_than: float) -> list[OpenOp]:
        """Ops that began before `older_than` and were not reported before."""
        found = [op for op in self._ops.values() if not op.stalled and op.begun_at < older_than]
        for op in found:
            op.stalled = True
        return found

    @property
    def stalled(self) -> list[int]:
        """Ids of the stalled ops."""
        return [op.op for op in self._ops.values() if op.stalled]

    def oldest_age(self, now: float) -> float:
        """Seconds since the oldest open op began; 0 if there is none."""
        return max((now - op.begun_at for op in self._ops.values()), default=0.0)

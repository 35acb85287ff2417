"""The ledger of one group: what is known of each slot, in arrays over all slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from canaryd.watch.burst import I64
from canaryd.watch.columns import Mask, distinct, pages_of, slots_of_pages
from canaryd.watch.counters import Counters, Skip
from canaryd.watch.report import SlotState

HAS_POSITION = 1
HAS_CHAIN = 2
REVIVED = 4
REPLACES = 8
"""A write of another token than the one stamped is to be stamped: its bytes must differ from those of the stamp."""

NEVER = -np.inf

_STATE = np.uint8
_UNSTAMPED = np.zeros(len(SlotState), dtype=np.bool_)
_UNSTAMPED[[SlotState.PENDING, SlotState.PROVISIONAL]] = True
_STAMP_STANDS = np.zeros(len(SlotState), dtype=np.bool_)
_STAMP_STANDS[[SlotState.SETTLED, SlotState.FREED]] = True
_OUTLIVES_FREEING = np.zeros(len(SlotState), dtype=np.bool_)
_OUTLIVES_FREEING[[SlotState.SETTLED, SlotState.SUSPECT, SlotState.DOUBT, SlotState.FREED]] = True
_COUNTS = _UNSTAMPED.copy()
_COUNTS[[SlotState.SETTLED, SlotState.SUSPECT, SlotState.DOUBT]] = True


class Ledger:
    """Per slot: state, content generation, identity (token, position, chain hashes), last write, last look.

    `generation` is raised by each write, copy destination and void that names the slot, and by nothing else.
    `covered` counts, per page, the open scoped ops that may write it; `freed_seq` and `freed_lane` say which message
    freed it last, and of which lane.

    Args:
        num_pages, page_size: shape of the group.
        reserved: half-open slot ranges that are never owned.
        counters: totals to add to.
    """

    def __init__(self, num_pages: int, page_size: int, reserved: Sequence[tuple[int, int]], counters: Counters) -> None:
        n = num_pages * page_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_slots = n
        self.state: npt.NDArray[np.uint8] = np.zeros(n, dtype=_STATE)
        self.flags: npt.NDArray[np.uint8] = np.zeros(n, dtype=np.uint8)
        self.generation: I64 = np.zeros(n, dtype=np.int64)
        self.token: I64 = np.full(n, -1, dtype=np.int64)
        self.position: I64 = np.full(n, -1, dtype=np.int64)
        self.prev_hash: I64 = np.zeros(n, dtype=np.int64)
        self.after: I64 = np.zeros(n, dtype=np.int64)
        self.last_op: I64 = np.full(n, -1, dtype=np.int64)
        self.begun_at = np.full(n, NEVER)
        self.ended_at = np.full(n, NEVER)
        self.verified_at = np.full(n, NEVER)
        self.doubted_at = np.full(n, NEVER)
        self.freed_seq: I64 = np.zeros(num_pages, dtype=np.int64)
        self.freed_lane = np.zeros(num_pages, dtype=np.object_)
        self.covered: npt.NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self.scopes = 0
        for first, last in reserved:
            self.state[max(0, first) : max(0, last)] = SlotState.RESERVED
        self._reserved: I64 = np.flatnonzero(self.state == SlotState.RESERVED)
        self._next_reserved = 0
        self.nonfinite_reserved: Mask = np.zeros(int(self._reserved.max(initial=-1)) + 1, dtype=np.bool_)
        self.has_reserved = bool(self._reserved.size)
        self._counters = counters
        self._queue: deque[I64] = deque()
        self._queued = 0

    # --- final sets ---------------------------------------------------------------------------------------------------

    def write(
        self,
        slots: I64,
        *,
        tokens: I64,
        positions: I64,
        prev_hash: I64,
        after: I64,
        flags: npt.NDArray[np.uint8] | int,
        op: int,
        begun_at: float,
        ended_at: float,
        changes_bytes: bool = False,
    ) -> None:
        """New content in `slots` [n] (in range, not reserved): raises the generation, queues the stamp.
        `changes_bytes`: another token than before must have left other bytes."""
        before = self.state[slots]
        self._counters.skipped[Skip.REWRITTEN] += int(np.count_nonzero(_UNSTAMPED[before]))
        self.generation[slots] += 1
        if changes_bytes:
            replaced = _STAMP_STANDS[before]
            if np.count_nonzero(replaced):
                held = self.token[slots]
                replaced &= (held >= 0) & (tokens >= 0) & (held != tokens)
                flags = (replaced.view(np.uint8) * np.uint8(REPLACES)) | np.asarray(flags, dtype=np.uint8)
        self.token[slots] = tokens
        self.position[slots] = positions
        self.prev_hash[slots] = prev_hash
        self.after[slots] = after
        self.flags[slots] = flags
        self.last_op[slots] = op
        self.begun_at[slots] = begun_at
        self.ended_at[slots] = ended_at
        self.state[slots] = SlotState.PENDING
        self.enqueue(slots)

    def void(self, slots: I64, op: int) -> None:
        """Content of `slots` [n] is undefined from here on: what was stamped no longer counts."""
        slots = self.unreserved(slots)
        self._counters.skipped[Skip.VOIDED] += int(np.count_nonzero(_UNSTAMPED[self.state[slots]]))
        self.generation[slots] += 1
        self.last_op[slots] = op
        self.forget(slots, SlotState.VOID)

    def free(self, pages: I64, *, seq: int, lane: str) -> None:
        """The slots of `pages` [p] leave the guarded set; their generation stays."""
        self.freed_seq[pages] = seq
        self.freed_lane[pages] = lane
        slots = self.unreserved(self.in_pages(pages))
        before = self.state[slots]
        self._counters.skipped[Skip.FREED] += int(np.count_nonzero(_UNSTAMPED[before]))
        self._counters.freed += slots.size
        self.state[slots] = SlotState.FREED
        self.forget(slots[~_OUTLIVES_FREEING[before]], SlotState.FREED)

    def revive(self, slots: I64, now: float) -> None:
        """Freed `slots` [n] are in use again without a write: those that were stamped are doubted from `now` on."""
        freed = slots[self.state[slots] == SlotState.FREED]
        stamped = self.verified_at[freed] > NEVER
        back = freed[stamped]
        self.state[back] = SlotState.DOUBT
        self.flags[back] |= REVIVED
        self.doubted_at[back] = now
        self.state[freed[~stamped]] = SlotState.UNKNOWN

    def forget(self, slots: I64, state: SlotState) -> None:
        """Drops the identity of `slots` [n]."""
        if not slots.size:
            return
        self.state[slots] = state
        self.flags[slots] = 0
        self.token[slots] = -1
        self.position[slots] = -1
        self.verified_at[slots] = NEVER

    def unreserved(self, slots: I64) -> I64:
        """`slots` without the reserved ones."""
        return slots[self.state[slots] != SlotState.RESERVED] if self.has_reserved else slots

    def next_reserved(self, limit: int) -> I64:
        """At most `limit` reserved slots, sorted; from call to call all of them in turn."""
        first = self._next_reserved
        taken = self._reserved[first : first + limit]
        self._next_reserved = first + limit if first + limit < self._reserved.size else 0
        return taken

    # --- scopes -------------------------------------------------------------------------------------------------------

    def cover(self, pages: I64, by: int) -> None:
        """Adds (`by` 1) or removes (`by` -1) one open op's scope, unique `pages` [p] in range."""
        self.covered[pages] += by
        self.scopes += by

    def is_covered(self, slots: I64) -> Mask:
        """Whether an open scoped op may write each of `slots` [n]."""
        if not self.scopes:
            return np.zeros(slots.size, dtype=np.bool_)
        return self.covered[pages_of(slots, self.page_size)] > 0

    # --- the queue of stamps ------------------------------------------------------------------------------------------

    def enqueue(self, slots: I64) -> None:
        """Queues `slots` [n] to be stamped, as long as they stay pending."""
        if not slots.size:
            return
        self._queue.append(slots)
        self._queued += slots.size
        if self._queued > max(65536, 2 * self.num_slots):
            # Slots that are written again and again while nothing can be stamped would queue without end.
            pending = np.flatnonzero(self.state == SlotState.PENDING)
            self._queue.clear()
            self._queue.append(pending)
            self._queued = pending.size

    def take_pending(self, limit: int) -> I64:
        """At most `limit` pending slots that no scope covers, sorted, oldest first; the rest stays queued."""
        taken: list[I64] = []
        held_back: list[I64] = []
        count = 0
        while self._queue and count < limit:
            slots = self._queue.popleft()
            self._queued -= slots.size
            slots = slots[self.state[slots] == SlotState.PENDING]
            covered = self.is_covered(slots)
            if covered.any():
                held_back.append(slots[covered])
                slots = slots[~covered]
            taken.append(slots[: limit - count])
            count += taken[-1].size
            if taken[-1].size < slots.size:
                self._queue.appendleft(slots[taken[-1].size :])
                self._queued += slots.size - taken[-1].size
        for slots in held_back:
            self.enqueue(slots)
        return distinct(np.concatenate(taken)) if taken else np.zeros(0, dtype=np.int64)

    def guarded_in(self, pages: I64 | None) -> int:
        """Slots of `pages` [p], or of the group, whose content counts: written or stamped, and not lost since."""
        state = self.state if pages is None else self.state[self.in_pages(pages)]
        return int(np.count_nonzero(_COUNTS[state]))

    # --- gaps ---------------------------------------------------------------------------------------------------------

    def doubt_all(self) -> None:
        """Messages were lost: stamps are doubted, everything else is forgotten."""
        stamped = np.isin(self.state, (SlotState.SETTLED, SlotState.SUSPECT, SlotState.DAMAGED, SlotState.DOUBT))
        lost = int(np.count_nonzero(_UNSTAMPED[self.state]))
        self._counters.skipped[Skip.GAP] += lost
        others = np.flatnonzero(~stamped & (self.state != SlotState.RESERVED))
        self.forget(others, SlotState.UNKNOWN)
        self.state[stamped] = SlotState.DOUBT
        self.flags &= ~np.uint8(REVIVED)
        self.covered[:] = 0
        self.scopes = 0
        self._queue.clear()
        self._queued = 0

    def in_pages(self, pages: I64) -> I64:
        """All slots of `pages` [p]."""
        return slots_of_pages(pages, self.page_size)

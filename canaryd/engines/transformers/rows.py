"""Rows and pages of the engine as the daemon was told of them, and what changed since.

The engine keeps its tables in Python dicts. Copying them at each step would cost more than the step's other
bookkeeping, so the few methods that change them leave a note here, and `collect` looks only at what was noted and at
the rows of the batch.
"""

from __future__ import annotations

import array
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from canaryd.client.facts import Final, SnapshotState, page_set, row_open
from canaryd.engines.transformers.geometry import I64, Group

_REQUEST_ID_CHARS = 200
"""Of a request id in a row's name; the counter behind it makes the name unique."""
_STEPS_REMEMBERED = 64
"""More steps than can wait for the GPU at once."""


@dataclass(eq=False)
class Row:
    """One stay of a request in the cache, in all groups.

    `state` is the engine's `RequestState`, `pages` one list per group as the daemon knows it.
    """

    name: str
    request_id: str
    state: Any
    pages: list[list[int]]


@dataclass(frozen=True)
class _Fork:
    group: int
    child: str
    sources: list[int]
    destinations: list[int]
    length: int


@dataclass(frozen=True)
class _Step:
    """What a launched op writes: `counts[i]` tokens of `rows[i]`."""

    op: int
    rows: list[Row]
    counts: Sequence[int]


class Rows:
    """The daemon's picture of the engine's tables. All methods are called on the engine's thread, `snapshot` excepted.

    Args:
        groups: the engine's groups.
        scheduler: the engine's scheduler, for the states of requests.
    """

    def __init__(self, groups: Sequence[Group], scheduler: Any) -> None:
        self._groups = tuple(groups)
        self._scheduler = scheduler
        self._numbers = itertools.count(1)
        self._rows: dict[str, Row] = {}
        self._used: list[set[int]] = [set() for _ in groups]
        self._sector_group: dict[int, int] = {}
        # notes since the last collection
        self._closing: list[Row] = []
        self._touched: dict[str, None] = {}
        self._restored: set[str] = set()
        self._forks: list[_Fork] = []
        self._free_pages: list[set[int]] = [set() for _ in groups]
        self._came_into_use: list[set[int]] = [set() for _ in groups]
        # the last batch, so that a step whose batch did not change costs little
        self._states: list[Any] = []
        self._batch_rows: list[Row] = []
        self._tables: list[list[list[int]]] = []
        self._known: list[list[list[int]]] = []
        self._steps: deque[_Step] = deque(maxlen=_STEPS_REMEMBERED)
        self._adopt()

    def _adopt(self) -> None:
        """Take over the rows of an engine that is already serving; the first snapshot tells the daemon of them."""
        ids = dict.fromkeys(itertools.chain.from_iterable(group.allocator.block_table for group in self._groups))
        for request_id in ids:
            state = self._scheduler.active_requests.get(request_id)
            if state is not None:
                self._rows[request_id] = self._row(request_id, state)
        for group, used in zip(self._groups, self._used, strict=True):
            used.update(itertools.chain.from_iterable(group.allocator.block_table.values()))
            used.update(group.allocator.ledger.cached_blocks)
            for page in used:
                self._sector_group[page // group.pages_per_sector] = group.number

    # --- notes ------------------------------------------------------------------------------------------------------

    def note_row_freed(self, request_id: str) -> None:
        """The request gives up its pages in some group, which is the end of its row in all."""
        row = self._rows.get(request_id)
        if row is not None:
            self._closing.append(row)
            del self._rows[request_id]
            self._states = []
        self._touched.pop(request_id, None)
        self._restored.discard(request_id)

    def note_pages_freed(self, group: int, pages: Iterable[int]) -> None:
        """Pages go back to the engine's free list."""
        self._free_pages[group].update(pages)

    def note_touched(self, request_id: str) -> None:
        """The request's table changed outside the growth of a batch."""
        self._touched[request_id] = None

    def note_restored(self, request_id: str) -> None:
        """The request's pages were filled from a copy elsewhere."""
        self._restored.add(request_id)

    def note_fork(self, group: int, child: str, sources: list[int], destinations: list[int], length: int) -> None:
        """A child's table was built from its parent's: `length` tokens, of which whole pages are copied."""
        self._forks.append(_Fork(group, child, list(sources), list(destinations), length))

    def note_reset(self) -> None:
        """Every page is free again."""
        for request_id in list(self._rows):
            self.note_row_freed(request_id)
        for used, free in zip(self._used, self._free_pages, strict=True):
            free.update(used)

    # --- collection -------------------------------------------------------------------------------------------------

    def collect(self, batch: Sequence[Any] = ()) -> tuple[Final, list[Row]]:
        """What changed since the last collection, and the rows of `batch` (`FutureRequestState`s) in its order."""
        final = Final()
        for row in self._closing:
            final.close(row.name)
        self._came_into_use = [set() for _ in self._groups]
        rows = self._follow(batch, final) if batch else []
        if self._forks:
            self._apply_forks(final)
        if self._touched:
            self._apply_touched(final)
        self._closing.clear()
        self._restored.clear()
        self._account(final)
        return final, rows

    def void_unfinished(self, final: Final, batch: Sequence[Any]) -> None:
        """An op failed half-way: the pages it may have written hold nothing that is known."""
        for group, pages in zip(self._groups, self._came_into_use, strict=True):
            doubtful = set(pages)
            for future in batch:
                row = self._rows.get(future.state.request_id)
                if row is not None:
                    first = 0 if group.ring else (future.state.position_offset - future.query_length) // group.page_size
                    doubtful.update(row.pages[group.number][max(0, first) :])
            if doubtful:
                final.void(group.number, sorted(doubtful))

    def void_everything(self, final: Final) -> None:
        """The whole pool was written, as in a warm-up."""
        for group in self._groups:
            final.void(group.number, range(group.first_page, group.num_pages))

    def _follow(self, batch: Sequence[Any], final: Final) -> list[Row]:
        """Open the rows that are new in the batch and tell of those that grew."""
        states = [future.state for future in batch]
        if len(states) == len(self._states) and all(map(is_, states, self._states)):
            for tables, told, group in zip(self._tables, self._known, self._groups, strict=True):
                # whole lists, not lengths: a table that something else overwrote must be told as it is
                if tables != told:
                    for row in self._batch_rows:
                        self._compare(row, group, final)
            return self._batch_rows
        rows = []
        for future in batch:
            state = future.state
            known = self._rows.get(state.request_id)
            if known is None:
                row = self._open(state.request_id, state, state.position_offset - future.query_length, final)
                self._restore(row, future.query_length, final)
            else:
                row = known
                for group in self._groups:
                    self._compare(row, group, final)
            rows.append(row)
        self._states, self._batch_rows = states, rows
        live = [group.allocator.block_table for group in self._groups]
        self._tables = [[table[row.request_id] for row in rows] for table in live]
        self._known = [[row.pages[group.number] for row in rows] for group in self._groups]
        return rows

    def _apply_forks(self, final: Final) -> None:
        for fork in self._forks:
            group = self._groups[fork.group]
            if not fork.destinations:
                continue
            final.void(fork.group, fork.destinations)
            table = group.allocator.block_table.get(fork.child)
            if table is None:
                continue
            # the copied pages are the last ones of the table; only slots that hold a token have a known content
            kept = min(fork.length, group.ring) if group.ring else fork.length
            shared = len(table) - len(fork.destinations)
            held = [
                max(0, min(group.page_size, kept - (shared + i) * group.page_size))
                for i in range(len(fork.destinations))
            ]
            final.copy(
                fork.group,
                _slots_of_heads(fork.sources, held, group.page_size),
                _slots_of_heads(fork.destinations, held, group.page_size),
            )
        for fork in self._forks:
            state = self._scheduler.active_requests.get(fork.child)
            if state is not None and fork.child not in self._rows:
                self._open(fork.child, state, fork.length, final)
            self._touched.pop(fork.child, None)
        self._forks.clear()

    def _apply_touched(self, final: Final) -> None:
        for request_id in self._touched:
            row = self._rows.get(request_id)
            if row is not None:
                for group in self._groups:
                    self._compare(row, group, final)
                continue
            # a prefix hit that did not get into the batch
            state = self._scheduler.active_requests.get(request_id)
            if state is not None and any(request_id in group.allocator.block_table for group in self._groups):
                self._open(request_id, state, state.position_offset, final)
        self._touched.clear()

    def _row(self, request_id: str, state: Any) -> Row:
        pages = [list(group.allocator.block_table.get(request_id, ())) for group in self._groups]
        return Row(f"{request_id[:_REQUEST_ID_CHARS]}#{next(self._numbers)}", request_id, state, pages)

    def _open(self, request_id: str, state: Any, length: int, final: Final) -> Row:
        row = self._row(request_id, state)
        self._rows[request_id] = row
        self._states = []
        ids = _known_ids(state)
        for group, pages in zip(self._groups, row.pages, strict=True):
            final.open(row.name, group.number, pages, length, ids=ids)
            self._came_into_use[group.number].update(pages)
        return row

    def _restore(self, row: Row, query_length: int, final: Final) -> None:
        """Pages copied back into the pool are written as whole pages: name the tokens, void the rest."""
        if row.request_id not in self._restored:
            return
        end = row.state.position_offset
        length = end - query_length
        tokens = np.frombuffer(_known_ids(row.state), dtype=np.int64)
        for group, pages in zip(self._groups, row.pages, strict=True):
            final.void(group.number, pages)
            # in a ring, the step of this op writes over its oldest positions
            positions = np.arange(max(0, end - group.ring) if group.ring else 0, length, dtype=np.int64)
            slots = group.slots_of_positions(np.array(pages, dtype=np.int64), positions)
            final.write(group.number, [row.name], [len(positions)], positions, tokens[positions], slots)

    def _compare(self, row: Row, group: Group, final: Final) -> None:
        """Tell of a table that grew, or of pages exchanged for identical ones."""
        table = group.allocator.block_table.get(row.request_id)
        known = row.pages[group.number]
        if table is None or table == known:
            return
        shared = min(len(table), len(known))
        start = next((i for i in range(shared) if table[i] != known[i]), shared)
        known[:] = table
        final.remap(row.name, group.number, start, table[start:])
        self._came_into_use[group.number].update(table[start:])

    def _account(self, final: Final) -> None:
        """Pages that came into use, sectors that changed hands, and pages that nobody holds any more."""
        several = len(self._groups) > 1
        for group, fresh, used in zip(self._groups, self._came_into_use, self._used, strict=True):
            if several and fresh:
                self._hand_over(group, fresh - used, final)
            used.update(fresh)
        for number, free in enumerate(self._free_pages):
            if free:
                gone = (free & self._used[number]) - self._came_into_use[number]
                if gone:
                    self._used[number] -= gone
                    final.free(number, sorted(gone))
                free.clear()

    def _hand_over(self, group: Group, pages: set[int], final: Final) -> None:
        """Sectors that another group used before: its pages there hold nothing of its own any more."""
        for sector in sorted({page // group.pages_per_sector for page in pages}):
            before = self._sector_group.get(sector, group.number)
            self._sector_group[sector] = group.number
            if before != group.number:
                size = self._groups[before].pages_per_sector
                final.void(before, range(sector * size, (sector + 1) * size))

    # --- snapshots --------------------------------------------------------------------------------------------------

    def remember_step(self, op: int, rows: list[Row], counts: Sequence[int]) -> None:
        """The op was launched: the engine counts its tokens already, the daemon does not before its end."""
        self._steps.append(_Step(op, rows, counts))

    def snapshot(self, open_ops: Iterable[int]) -> SnapshotState:
        """Rows and cached pages as the ends so far told them; `open_ops` are the ops whose end was not yet sent.

        Pending ends repeat what a row's opening already says here; what they write comes after the lengths given.
        """
        waiting = set(open_ops)
        unsent: dict[str, int] = {}
        for step in self._steps:
            if step.op in waiting:
                for row, count in zip(step.rows, step.counts, strict=True):
                    unsent[row.name] = unsent.get(row.name, 0) + int(count)
        rows = {row.name: row for row in [*self._closing, *self._rows.values()]}
        state = SnapshotState()
        for row in rows.values():
            length = max(0, row.state.position_offset - unsent.get(row.name, 0))
            ids = _known_ids(row.state)
            for group, pages in zip(self._groups, row.pages, strict=True):
                state.rows.append(row_open(row.name, group.number, pages, length, ids=ids))
        for group, used in zip(self._groups, self._used, strict=True):
            held = set(itertools.chain.from_iterable(row.pages[group.number] for row in rows.values()))
            idle = used - held
            if idle:
                state.cached.append(page_set(group.number, sorted(idle)))
        return state


def _known_ids(state: Any) -> bytes:
    ids = array.array("q", state.initial_tokens)
    ids.extend(state.generated_tokens)
    return ids.tobytes()


def _slots_of_heads(pages: Sequence[int], held: Sequence[int], page_size: int) -> I64:
    """The first `held[i]` slots of each page."""
    counts = np.array(held, dtype=np.int64)
    starts = np.repeat(np.array(pages, dtype=np.int64) * page_size, counts)
    ends = np.cumsum(counts)
    return starts + np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(ends - counts, counts)

"""A client that believes nothing: it compares what the adapter says with the bytes and tables of the engine.

It keeps a stamp per slot as the daemon would (position and the hash of all tokens up to it) and checks after each op
that no finding could follow from a healthy engine:

- no byte of the pool changes outside an op;
- every byte that changes inside an op belongs to a slot that the op's end names, or to a reserved one;
- no stamped slot that the end does not name has changed, in any group over the same bytes;
- every named write lies where its row keeps that position, and continues the row with the token that was known;
- every row's stamps are its own tokens' (prefix hits, forks, dedup and restores included), and pages follow the
  engine's own tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from canaryd.client.facts import Final, SnapshotState, end_message
from canaryd.wire.messages import Finding, GroupSpec, RowOpen
from canaryd.wire.validate import validate


def ints(column: bytes) -> list[int]:
    return np.frombuffer(column, dtype=np.int64).tolist()


@dataclass
class ModelRow:
    pages: list[int]
    length: int
    tokens: dict[int, int]
    known: int


@dataclass
class ModelGroup:
    spec: GroupSpec
    rows: dict[str, ModelRow] = field(default_factory=dict)
    stamps: dict[int, tuple[int, int]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)

    def slot(self, row: ModelRow, position: int) -> int:
        kept = position % self.spec.ring if self.spec.ring else position
        page, offset = divmod(kept, self.spec.page_size)
        return row.pages[page] * self.spec.page_size + offset

    def positions(self, row: ModelRow) -> range:
        return range(max(0, row.length - self.spec.ring) if self.spec.ring else 0, row.length)


class RecordingClient:
    """Takes the place of `canaryd.client.client.Client`; `violations` must stay empty."""

    def __init__(
        self,
        cache: Any,
        *,
        groups: Sequence[GroupSpec],
        snapshot: Callable[[], SnapshotState],
        snapshot_every: int = 3,
        **_description: Any,
    ) -> None:
        self.cache = cache
        self.groups = [ModelGroup(spec) for spec in groups]
        self.violations: list[str] = []
        self.seen: Counter[str] = Counter()
        self.finals: list[tuple[int, str, Final]] = []
        self.findings: list[Finding] = []
        self.closed = False
        self._snapshot = snapshot
        self._snapshot_every = snapshot_every
        self._op = 0
        self._open: set[int] = set()
        self._bytes = cache.cache_tensor.clone()
        self._first = True

    # --- the client's interface -------------------------------------------------------------------------------------

    def start(self) -> None:
        pass

    def begin(self) -> int:
        if not torch.equal(self._bytes, self.cache.cache_tensor):
            self._complain("bytes changed outside any op")
            self._bytes = self.cache.cache_tensor.clone()
        if self._first or self._op % self._snapshot_every == 0:
            self._compare_snapshot(self._snapshot())
        self._op += 1
        self._open.add(self._op)
        return self._op

    def end(self, op: int, status: str = "done", final: Final | None = None) -> None:
        if op not in self._open:
            self._complain(f"op {op} is not open")
        self._open.discard(op)
        final = final or Final()
        self.finals.append((op, status, final))
        try:
            self._apply(op, status, final)
        except Exception as error:  # noqa: BLE001 - reported by the test, not into the engine
            self._complain(f"op {op}: {type(error).__name__}: {error}")

    def end_after(self, op: int, events: Sequence[Any], final: Any = None, status: str = "done") -> None:
        assert all(event.query() for event in events)
        self.end(op, status, final() if callable(final) else final)

    def open_ops(self) -> frozenset[int]:
        return frozenset(self._open)

    def poll_findings(self) -> list[Finding]:
        found, self.findings = self.findings, []
        return found

    def close(self) -> None:
        self.closed = True

    # --- the model --------------------------------------------------------------------------------------------------

    def _complain(self, text: str) -> None:
        self.violations.append(f"op {self._op}: {text}")

    def _compare_snapshot(self, state: SnapshotState) -> None:
        """The first one fills the model (an engine that was serving already), later ones must equal it."""
        rows: list[dict[str, RowOpen]] = [{} for _ in self.groups]
        for row in state.rows:
            if row.row in rows[row.group]:
                self._complain(f"snapshot names {row.row} twice in group {row.group}")
            rows[row.group][row.row] = row
        cached = [set[int]() for _ in self.groups]
        for entry in state.cached:
            cached[entry.group].update(ints(entry.pages))
        for number, group in enumerate(self.groups):
            if self._first:
                for row in rows[number].values():
                    self._open_row(group, row)
                    adopted = group.rows[row.row]
                    for position in group.positions(adopted):
                        group.stamps[group.slot(adopted, position)] = (position, self._chain(adopted, position))
                group.used |= cached[number]
                continue
            told = {name: (ints(row.pages), row.length) for name, row in rows[number].items()}
            model = {name: (row.pages, row.length) for name, row in group.rows.items()}
            if told != model:
                self._complain(f"snapshot of group {number} differs: {told} is not {model}")
            held = {page for row in group.rows.values() for page in row.pages}
            if cached[number] != group.used - held:
                self._complain(f"cached pages of group {number} differ: {cached[number]} is not {group.used - held}")
        self._first = False

    def _apply(self, op: int, status: str, final: Final) -> None:
        if final.problem is not None:
            raise final.problem
        end = end_message(op, "done", final.facts)
        validate(end)
        before = self._bytes
        self._bytes = self.cache.cache_tensor.clone()
        named: list[set[int]] = [set() for _ in self.groups]
        changed_rows: list[set[str]] = [set() for _ in self.groups]
        for name in end.closed:
            self.seen["closed"] += 1
            removed = [group.rows.pop(name, None) for group in self.groups]
            if not any(removed):
                self._complain(f"{name} closes and was not open")
        for row in end.opened:
            self.seen["opened"] += 1
            self.seen["prefix_hits"] += row.length > 0
            self._open_row(self.groups[row.group], row)
            changed_rows[row.group].add(row.row)
        for remap in end.remaps:
            group = self.groups[remap.group]
            row = group.rows[remap.row]
            tail = ints(remap.pages)
            self.seen["exchanges"] += remap.start < len(row.pages)
            row.pages[remap.start :] = tail
            group.used.update(tail)
            changed_rows[remap.group].add(remap.row)
        for entry in end.voids:
            self.seen["voids"] += 1
            group = self.groups[entry.group]
            size = group.spec.page_size
            for page in ints(entry.pages):
                named[entry.group].update(range(page * size, (page + 1) * size))
                for slot in range(page * size, (page + 1) * size):
                    group.stamps.pop(slot, None)
        for writes in end.writes:
            self._write(writes, named, changed_rows)
        for copies in end.copies:
            group = self.groups[copies.group]
            for source, destination in zip(ints(copies.sources), ints(copies.destinations), strict=True):
                self.seen["copies"] += 1
                named[copies.group].add(destination)
                group.stamps[destination] = group.stamps[source]
        for entry in end.freed:
            group = self.groups[entry.group]
            pages = set(ints(entry.pages))
            self.seen["freed"] += len(pages)
            if not pages <= group.used:
                self._complain(f"pages {pages - group.used} of group {entry.group} are freed and were not used")
            group.used -= pages
            size = group.spec.page_size
            for page in pages:
                for slot in range(page * size, (page + 1) * size):
                    group.stamps.pop(slot, None)
        self._check_bytes(before, named)
        for number, group in enumerate(self.groups):
            if status == "done":
                for name in changed_rows[number]:
                    self._check_row(number, group, name)
                self._check_tables(number, group)

    def _open_row(self, group: ModelGroup, row: RowOpen) -> None:
        if row.row in group.rows:
            self._complain(f"{row.row} opens twice")
        tokens = dict(enumerate(ints(row.ids)))
        pages = ints(row.pages)
        group.rows[row.row] = ModelRow(pages, row.length, tokens, len(tokens))
        group.used.update(pages)
        if row.length > len(tokens):
            self._complain(f"{row.row} has {row.length} tokens of which {len(tokens)} are known")

    def _write(self, writes: Any, named: list[set[int]], changed_rows: list[set[str]]) -> None:
        group = self.groups[writes.group]
        positions, tokens, slots = ints(writes.positions), ints(writes.tokens), ints(writes.slots)
        at = 0
        for name, count in zip(writes.rows, ints(writes.counts), strict=True):
            row = group.rows[name]
            changed_rows[writes.group].add(name)
            for position, token, slot in list(zip(positions, tokens, slots, strict=True))[at : at + count]:
                self.seen["writes"] += 1
                if slot != group.slot(row, position):
                    self._complain(f"{name} writes position {position} at {slot}, not at {group.slot(row, position)}")
                if any(low <= slot < high for low, high in group.spec.reserved):
                    self._complain(f"{name} writes reserved slot {slot}")
                if row.tokens.get(position, token) != token:
                    self._complain(f"{name} writes another token than known at position {position}")
                skipped = group.spec.ring and position > row.length
                self.seen["skips"] += bool(skipped)
                restored = position < row.length
                self.seen["restored"] += restored
                if position > row.length and not skipped:
                    self._complain(f"{name} has {row.length} tokens and writes position {position}")
                row.tokens[position] = token
                row.length = max(row.length, position + 1)
                named[writes.group].add(slot)
                group.stamps[slot] = (position, self._chain(row, position))
            at += count

    @staticmethod
    def _chain(row: ModelRow, position: int) -> int:
        return hash(tuple(row.tokens[i] for i in range(position + 1)))

    def _check_bytes(self, before: torch.Tensor, named: list[set[int]]) -> None:
        changed = (before != self._bytes).numpy()
        if not changed.any():
            return
        explained = np.zeros_like(changed)
        for number, group in enumerate(self.groups):
            spec = group.spec
            pages = changed.reshape(spec.num_pages, -1, spec.page_size, spec.regions[0].piece_bytes)
            slots = np.flatnonzero(pages.any(axis=(1, 3)).reshape(-1))
            wild = [s for s in slots.tolist() if s in group.stamps and s not in named[number]]
            if wild:
                self._complain(f"stamped slots {wild} of group {number} changed and are not named")
            allowed = np.zeros(spec.num_pages * spec.page_size, dtype=bool)
            allowed[list(named[number])] = True
            for low, high in spec.reserved:
                allowed[low:high] = True
            shape = (spec.num_pages, 1, spec.page_size, 1)
            explained.reshape(pages.shape)[...] |= allowed.reshape(shape)
        if (changed & ~explained).any():
            self._complain(f"{int((changed & ~explained).sum())} bytes changed in slots that are not named")

    def _check_row(self, number: int, group: ModelGroup, name: str) -> None:
        row = group.rows.get(name)
        if row is None:
            return
        for position in group.positions(row):
            stamp = group.stamps.get(group.slot(row, position))
            if stamp != (position, self._chain(row, position)):
                self._complain(f"group {number}: {name} position {position} is not what the row says: {stamp}")
                return

    def _check_tables(self, number: int, group: ModelGroup) -> None:
        allocator = list(self.cache.cache_allocators.values())[number]
        engine = sorted(map(tuple, allocator.block_table.values()))
        model = sorted(tuple(row.pages) for row in group.rows.values())
        if engine != model:
            self._complain(f"tables of group {number} differ: {engine} is not {model}")
        used = {page for table in allocator.block_table.values() for page in table}
        used.update(allocator.ledger.cached_blocks)
        if used != group.used:
            self._complain(f"used pages of group {number} differ: {used ^ group.used}")

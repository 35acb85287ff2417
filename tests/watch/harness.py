"""A watch, a fake backend and a hand-driven stream: the small tests' bench."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from canaryd.watch.findings import Finding
from canaryd.watch.policy import Policy
from canaryd.watch.watch import Watch
from canaryd.wire.messages import (
    Attach,
    Begin,
    Copies,
    End,
    GroupSpec,
    Identity,
    PageSet,
    RegionSpec,
    Remap,
    RowOpen,
    Snapshot,
    Writes,
)
from tests.watch.fake_backend import WORDS, FakeBackend

SLOT_BYTES = WORDS * 8


def column(values: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(values, dtype="<i8").tobytes()


def group_spec(
    name: str = "full",
    *,
    num_pages: int = 16,
    page_size: int = 4,
    reserved: Sequence[tuple[int, int]] = (),
    holes_ok: bool = False,
    ring: int = 0,
) -> GroupSpec:
    region = RegionSpec(
        name="kv",
        memory=0,
        offset=0,
        page_stride=page_size * SLOT_BYTES,
        slot_stride=SLOT_BYTES,
        piece_bytes=SLOT_BYTES,
    )
    return GroupSpec(
        name=name,
        num_pages=num_pages,
        page_size=page_size,
        regions=[region],
        reserved=list(reserved),
        holes_ok=holes_ok,
        ring=ring,
    )


def attach_of(groups: Sequence[GroupSpec], *, frees: bool = True, tiers: str = "opaque") -> Attach:
    return Attach(
        identity=Identity(engine="sim"),
        engine_kind="sim",
        engine_version="1",
        client_version="1",
        memories=[],
        groups=list(groups),
        frees=frees,
        tiers=tiers,
    )


def opened(
    row: str,
    pages: Sequence[int] = (),
    length: int = 0,
    ids: Sequence[int] = (),
    *,
    group: int = 0,
    namespace: int = 0,
) -> RowOpen:
    return RowOpen(row=row, group=group, pages=column(pages), length=length, namespace=namespace, ids=column(ids))


def writes(*entries: tuple[str, Sequence[int], Sequence[int], Sequence[int]], group: int = 0) -> Writes:
    """Entries (row, positions, tokens, slots)."""
    return Writes(
        group=group,
        rows=[entry[0] for entry in entries],
        counts=column([len(entry[1]) for entry in entries]),
        positions=column([p for entry in entries for p in entry[1]]),
        tokens=column([t for entry in entries for t in entry[2]]),
        slots=column([s for entry in entries for s in entry[3]]),
    )


def pages(*numbers: int, group: int = 0) -> PageSet:
    return PageSet(group=group, pages=column(numbers))


def copies(sources: Sequence[int], destinations: Sequence[int], group: int = 0) -> Copies:
    return Copies(group=group, sources=column(sources), destinations=column(destinations))


def remap(row: str, start: int, to: Sequence[int], group: int = 0) -> Remap:
    return Remap(row=row, group=group, start=start, pages=column(to))


class Bench:
    """Drives a watch with a clock of its own. Attached and resynchronised unless told otherwise."""

    def __init__(
        self,
        groups: Sequence[GroupSpec] | None = None,
        *,
        policy: Policy | None = None,
        frees: bool = True,
        tiers: str = "opaque",
        scheme: str = "native",
        snapshot: bool = True,
        watch_class: type[Watch] = Watch,
    ) -> None:
        groups = list(groups or [group_spec()])
        self.rng = np.random.default_rng(11)
        self.policy = policy or Policy()
        self.specs = groups
        self.watch = watch_class(
            attach_of(groups, frees=frees, tiers=tiers),
            policy=self.policy,
            scheme=scheme,
            chain_key=12345,
            slot_bytes=[SLOT_BYTES] * len(groups),
        )
        self.memories = [
            self.rng.integers(-(1 << 62), 1 << 62, size=(spec.num_pages * spec.page_size, WORDS)) for spec in groups
        ]
        self.backend = FakeBackend(self.memories, [spec.page_size for spec in groups], scheme, 12345)
        self.now = 100.0
        self.seq = 0
        self.findings: list[Finding] = []
        self._op = 0
        if snapshot:
            self.send(Snapshot(open_ops=[], rows=[], cached=[]))

    # --- stream -------------------------------------------------------------------------------------------------------

    def send(self, message: Begin | End | Snapshot) -> None:
        self.seq += 1
        self.watch.apply(self.seq, message, self.now)

    def begin(self, scope: list[PageSet] | None = None, lane: str = "main") -> int:
        self._op += 1
        self.send(Begin(op=self._op, scope=scope, lane=lane))
        return self._op

    def end(self, op: int, **sets: object) -> None:
        self.send(End(op=op, **sets))

    def op(self, **sets: object) -> None:
        """A whole op: begin, random bytes in what it writes, end."""
        op = self.begin()
        for written in sets.get("writes", []):
            self.scribble(np.frombuffer(written.slots, dtype="<i8"), written.group)
        for copied in sets.get("copies", []):
            memory = self.memories[copied.group]
            sources, destinations = np.frombuffer(copied.sources, "<i8"), np.frombuffer(copied.destinations, "<i8")
            if all(((column >= 0) & (column < memory.shape[0])).all() for column in (sources, destinations)):
                memory[destinations] = memory[sources]
        self.end(op, **sets)

    def resync(self, rows: Sequence[RowOpen] = (), cached: Sequence[PageSet] = ()) -> None:
        self.send(Snapshot(open_ops=[], rows=list(rows), cached=list(cached)))

    def scribble(self, slots: Sequence[int] | np.ndarray, group: int = 0) -> None:
        slots = np.asarray(slots, dtype=np.int64)
        memory = self.memories[group]
        slots = slots[(slots >= 0) & (slots < memory.shape[0])]
        memory[slots] = self.rng.integers(-(1 << 62), 1 << 62, size=(slots.size, WORDS))

    # --- bursts -------------------------------------------------------------------------------------------------------

    def burst(self, announced: int | None = None) -> bool:
        burst = self.watch.next_burst(self.now)
        if burst is None:
            return False
        result = self.backend.run(burst)
        self.watch.on_burst_done(result, self.seq if announced is None else announced, self.now)
        self.collect()
        return True

    def tick(self, count: int = 1) -> None:
        """Ticks, with the second reads between them."""
        for _ in range(count):
            self.now += self.policy.tick_seconds
            self.burst()
            due = self.watch.next_due(self.now)
            if due is not None:
                self.now = due
                self.burst()

    def settle(self) -> None:
        self.tick(2)

    def collect(self) -> list[Finding]:
        self.findings += self.watch.take_findings()
        return self.findings

    def state(self, slot: int, group: int = 0) -> str:
        return self.watch.explain(group, slot, self.now).state

    def flip(self, slot: int, group: int = 0, bit: int = 3, word: int = 1) -> None:
        self.memories[group][slot, word] ^= 1 << bit

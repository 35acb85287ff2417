"""A seeded simulated engine: it does what real ones do, and tells it through the stream, message by message.

Physical writes happen in small steps between an op's begin and end, so that a burst can read in the middle of them.
Every write puts fresh random bytes: recomputed KV is never bit-identical.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from canaryd.wire.messages import Begin, Copies, End, GroupSpec, PageSet, Remap, RowOpen, Snapshot, Writes
from tests.watch.fake_backend import WORDS
from tests.watch.harness import column, group_spec

RING = 10
PAGE = 4
FULL, SWA = 0, 1


def specs() -> list[GroupSpec]:
    return [
        group_spec("full", num_pages=64, page_size=PAGE, reserved=[(0, PAGE)]),
        group_spec("window", num_pages=40, page_size=PAGE, reserved=[(0, PAGE)], ring=RING),
    ]


def lane_of(scope: list[PageSet] | None) -> str:
    return "main" if scope is None else "load"


@dataclass
class Features:
    """What this run of the engine does (swarm: each is switched at random)."""

    prefix_cache: bool = True
    dedup: bool = True
    preemption: bool = True
    asynchronous: bool = True
    loads: bool = True
    copies: bool = True
    failures: bool = True
    zeroing: bool = True
    frees: bool = True
    gaps: bool = True
    hidden_ids: bool = True
    window: bool = False

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Features:
        """Each with probability 0.7. Ring groups share no prefixes."""
        features = cls(**{name: bool(rng.random() < 0.7) for name in cls.__dataclass_fields__})
        if features.window:
            features.prefix_cache = features.dedup = False
        return features


@dataclass
class Request:
    """One request: `written` counts tokens of ended ops, `scheduled` those of ops under way too."""

    name: str
    prompt: list[int]
    target: int
    namespace: int
    announces_ids: bool
    tokens: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    written: int = 0
    scheduled: int = 0
    opened: bool = False
    closing: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.tokens


@dataclass
class Op:
    """An op under way: micro-steps still to run, and what its end will say."""

    number: int
    scope: list[PageSet] | None
    todo: deque[Callable[[], None]] = field(default_factory=deque)
    writes: dict[int, list[tuple[str, int, int, int]]] = field(default_factory=dict)
    opened: list[Request] = field(default_factory=list)
    open_messages: list[RowOpen] = field(default_factory=list)
    voids: dict[int, list[int]] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    freed: dict[int, list[int]] | None = None
    grown: list[tuple[Request, int]] = field(default_factory=list)
    status: str = "done"


class Engine:
    """The engine. `step()` makes one small random move; messages go to `outbox` as (number, message)."""

    def __init__(self, seed: int, features: Features | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.features = features or Features.drawn(self.rng)
        self.specs = specs()[: 2 if self.features.window else 1]
        self.groups = range(len(self.specs))
        self.memories = [
            self.rng.integers(-(1 << 62), 1 << 62, size=(spec.num_pages * PAGE, WORDS)) for spec in self.specs
        ]
        self.outbox: deque[tuple[int, Begin | End | Snapshot]] = deque()
        self.sequence = 0
        self.announced = 0
        self.free = [list(range(1, spec.num_pages)) for spec in self.specs]
        self.references: dict[int, int] = {}
        self.prefix: dict[tuple[int, ...], int] = {}
        self.key_of: dict[int, tuple[int, ...]] = {}
        self.requests: list[Request] = []
        self.waiting: list[Request] = []
        self.ops: deque[Op] = deque()
        self.loads: list[Op] = []
        self.pending_close: list[str] = []
        self.pending_freed: dict[int, list[int]] = {FULL: [], SWA: []}
        self.frozen = False
        self.drop_next = False
        self.done_steps = 0
        self._op = 0
        self._request = 0
        self._documents = [self.rng.integers(0, 1000, size=24).tolist() for _ in range(3)]

    # --- the stream ---------------------------------------------------------------------------------------------------

    def send(self, message: Begin | End | Snapshot) -> None:
        self.sequence += 1
        self.announced = self.sequence
        if self.drop_next:
            self.drop_next = False
            return
        self.outbox.append((self.sequence, message))

    def resync(self) -> None:
        """Answers a resync: the whole state as of the ops that have ended."""
        rows = []
        for request in self.requests:
            if not request.opened:
                continue
            ids = request.ids if request.announces_ids else []
            for group, pages in self._tables(request):
                rows.append(
                    RowOpen(
                        row=request.name,
                        group=group,
                        pages=column(pages),
                        length=request.written,
                        namespace=request.namespace,
                        ids=column(ids),
                    )
                )
        held = {page for request in self.requests if request.opened for page in request.full}
        cached = sorted(set(self.prefix.values()) - held)
        open_ops = [Begin(op=op.number, scope=op.scope, lane=lane_of(op.scope)) for op in [*self.ops, *self.loads]]
        self.pending_close = []
        self.pending_freed = {FULL: [], SWA: []}
        self.send(Snapshot(open_ops=open_ops, rows=rows, cached=[PageSet(group=FULL, pages=column(cached))]))

    # --- one random move ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.done_steps += 1
        if not self.frozen and len(self.requests) + len(self.waiting) < 6 and self.rng.random() < 0.3:
            self._arrive()
        if self.ops and (self.rng.random() < 0.75 or len(self.ops) >= (2 if self.features.asynchronous else 1)):
            self._advance(self.ops[0])
        elif self.loads and self.rng.random() < 0.4:
            self._advance(self.loads[0])
        else:
            self._schedule()

    def drain(self) -> None:
        """Lets everything under way end."""
        while self.ops:
            self._advance(self.ops[0])
        while self.loads:
            self._advance(self.loads[0])

    def _advance(self, op: Op) -> None:
        if op.status == "failed" and self.rng.random() < 0.3:
            op.todo.clear()
        for _ in range(int(self.rng.integers(1, 4))):
            if op.todo:
                op.todo.popleft()()
        if not op.todo:
            (self.ops if op in self.ops else self.loads).remove(op)
            self._finish(op)

    def _arrive(self) -> None:
        rng = self.rng
        self._request += 1
        document = self._documents[int(rng.integers(3))]
        shared = document[: int(rng.integers(1, len(document)))]
        prompt = shared + rng.integers(0, 1000, size=int(rng.integers(1, 8))).tolist()
        self.waiting.append(
            Request(
                name=f"r{self._request}",
                prompt=prompt,
                target=int(rng.integers(1, 24)),
                namespace=0,
                announces_ids=not (self.features.hidden_ids and rng.random() < 0.3),
            )
        )

    # --- scheduling ---------------------------------------------------------------------------------------------------

    def _begin(self, scope: list[PageSet] | None = None) -> Op:
        self._op += 1
        op = Op(number=self._op, scope=scope)
        self.send(Begin(op=op.number, scope=scope, lane=lane_of(scope)))
        return op

    def _schedule(self) -> None:
        rng = self.rng
        if self.features.gaps and rng.random() < 0.01 and not self.frozen:
            self.drop_next = True
        if not self.frozen and self.waiting and self.features.loads and not self.ops and not self.loads:
            self._admit(Op(number=0, scope=None), self.waiting.pop(0)) if len(self.waiting[0].prompt) > PAGE else None
        op = self._begin()
        self.ops.append(op)
        if not self.frozen:
            if self.features.preemption and self.requests and rng.random() < 0.05:
                self._preempt(self.requests[int(rng.integers(len(self.requests)))])
            if self.waiting and rng.random() < 0.6:
                self._admit(op, self.waiting.pop(0))
        if self.features.failures and rng.random() < 0.04:
            op.status = "failed"
        budget = 12
        for request in list(self.requests):
            if request.closing:
                continue
            # Asynchronous engines schedule the next token of a request whose last one is still under way.
            count = min(budget, max(1, len(request.prompt) - request.scheduled), int(rng.integers(1, 9)))
            if count > 0 and (request.opened or request in op.opened):
                budget -= self._write(op, request, count)
        self._graph_padding(op)

    def _graph_padding(self, op: Op) -> None:
        """Padding rows write the reserved page."""
        op.todo.append(lambda: self._scribble(FULL, [int(self.rng.integers(PAGE))]))
        op.writes.setdefault(FULL, []).append(("padding", 0, 0, int(self.rng.integers(PAGE))))

    def _tables(self, request: Request) -> list[tuple[int, list[int]]]:
        return [(FULL, request.full), (SWA, request.window)][: len(self.specs)]

    def _admit(self, op: Op, request: Request) -> None:
        """Opens a row, on cached pages if there are any, or lets a scoped load fetch its prefix."""
        if self.features.window:
            window = self._take(SWA, 3)
            if window is None:
                self.waiting.insert(0, request)
                return
            request.window = window
        # A load runs on a lane of its own: it must not be given pages that a step under way may still write.
        if self.features.loads and not self.loads and not self.ops and len(request.prompt) > PAGE:
            self._load(request)
            return
        if self.features.prefix_cache:
            request.full = self._cached_prefix(request)
            for page in request.full:
                self.references[page] = self.references.get(page, 0) + 1
            request.written = request.scheduled = len(request.full) * PAGE
        self.requests.append(request)
        op.opened.append(request)
        op.open_messages += [self._row(request, group) for group in self.groups]

    def _row(self, request: Request, group: int) -> RowOpen:
        ids = request.ids if request.announces_ids else []
        return RowOpen(
            row=request.name,
            group=group,
            pages=column(request.full if group == FULL else request.window),
            length=request.written,
            namespace=request.namespace,
            ids=column(ids),
        )

    def _cached_prefix(self, request: Request) -> list[int]:
        pages = []
        for end in range(PAGE, len(request.prompt), PAGE):
            page = self.prefix.get(tuple(request.prompt[:end]))
            if page is None:
                break
            pages.append(page)
        return pages

    def _load(self, request: Request) -> None:
        """Fetches the first pages of the prompt in an op of its own, with a scope; the row opens at its end."""
        count = len(request.prompt) // PAGE
        # What is evicted for the load is named as freed by the load; what steps free, by steps: lanes protect pages.
        steps_freed, self.pending_freed = self.pending_freed, {FULL: [], SWA: []}
        # A page is named as freed before, or with, what uses it next.
        fetched = None if any(steps_freed.values()) else self._take(FULL, count)
        freed, self.pending_freed = self.pending_freed, steps_freed
        if fetched is None:
            self._free_pages(SWA, request.window)
            request.window = []
            for group, evicted in freed.items():
                self.pending_freed[group] += evicted
            self.waiting.append(request)
            return
        for page in fetched:
            self.references[page] = 1
        request.full = fetched
        self.requests.append(request)
        op = self._begin([PageSet(group=group, pages=column(pages)) for group, pages in self._tables(request)])
        self.loads.append(op)
        op.freed = freed
        op.opened.append(request)
        op.open_messages = [self._row(request, group) for group in self.groups]
        if self.features.zeroing:
            for group, pages in self._tables(request):
                op.voids.setdefault(group, []).extend(pages)
        self._write(op, request, count * PAGE)

    def _write(self, op: Op, request: Request, count: int) -> int:
        first = request.scheduled
        limit = len(request.prompt) + request.target
        count = min(count, limit - first)
        count = min(count, max(1, len(request.prompt) - first))
        needed = -(-(first + count) // PAGE) - len(request.full)
        if count <= 0:
            return 0
        if needed > 0:
            fresh = self._take(FULL, needed)
            if fresh is None:
                return 0
            for page in fresh:
                self.references[page] = 1
            request.full.extend(fresh)
            if self.features.zeroing:
                op.voids.setdefault(FULL, []).extend(fresh)
                op.todo.append(lambda: self._zero(FULL, fresh))
        while len(request.ids) < first + count:
            request.tokens.append(int(self.rng.integers(0, 1000)))
        for position in range(first, first + count):
            token = request.ids[position]
            full_slot = request.full[position // PAGE] * PAGE + position % PAGE
            place = position % RING
            slots = [(FULL, full_slot)]
            if self.features.window:
                slots.append((SWA, request.window[place // PAGE] * PAGE + place % PAGE))
            for group, slot in slots:
                op.todo.append(lambda group=group, slot=slot: self._scribble(group, [slot]))
                told = token if request.announces_ids or position >= len(request.prompt) else -1
                op.writes.setdefault(group, []).append((request.name, position, told, slot))
        request.scheduled = first + count
        op.grown.append((request, first + count))
        return count

    # --- endings ------------------------------------------------------------------------------------------------------

    def _finish(self, op: Op) -> None:
        rng = self.rng
        remaps: list[Remap] = []
        if op.status == "failed":
            self._fail(op)
        for request in op.opened:
            request.opened = request in self.requests
        closed: list[str] = []
        if op.freed is None:
            closed, self.pending_close = self.pending_close, []
        for request, reached in op.grown:
            if request in self.requests:
                request.written = max(request.written, reached) if op.status == "done" else request.written
                self._register(request)
        if self.features.dedup and op.status == "done":
            remaps = self._dedup()
        if op.status == "done" and not self.frozen:
            for request in list(self.requests):
                if request.opened and request.written >= len(request.prompt) + request.target:
                    self._close(request)
            if op.freed is None:
                closed += self.pending_close
                self.pending_close = []
        copies, fork_rows = (
            self._fork()
            if self.features.copies and rng.random() < 0.15 and not self.frozen and op.freed is None
            else ([], [])
        )
        freed = op.freed
        if freed is None:
            freed, self.pending_freed = self.pending_freed, {FULL: [], SWA: []}
        # Preempted while the op was under way: it never opens.
        alive = {request.name for request in op.opened if request.opened}
        self.send(
            End(
                op=op.number,
                status=op.status,
                closed=closed,
                opened=[row for row in op.open_messages if row.row in alive and row.row not in closed] + fork_rows,
                remaps=[remap for remap in remaps if remap.row not in closed],
                voids=[PageSet(group=group, pages=column(pages)) for group, pages in op.voids.items()],
                writes=[self._columns(group, items) for group, items in op.writes.items()],
                copies=copies,
                freed=[PageSet(group=group, pages=column(pages)) for group, pages in freed.items() if pages]
                if self.features.frees
                else [],
            )
        )

    @staticmethod
    def _columns(group: int, items: list[tuple[str, int, int, int]]) -> Writes:
        rows: list[str] = []
        counts: list[int] = []
        for name, *_ in items:
            if rows and rows[-1] == name:
                counts[-1] += 1
            else:
                rows.append(name)
                counts.append(1)
        return Writes(
            group=group,
            rows=rows,
            counts=column(counts),
            positions=column([item[1] for item in items]),
            tokens=column([item[2] for item in items]),
            slots=column([item[3] for item in items]),
        )

    def _fail(self, op: Op) -> None:
        """The op ends failed: it names nothing as written and voids every page that it may have touched."""
        for group, items in op.writes.items():
            touched = sorted({slot // PAGE for name, _, _, slot in items if name != "padding"})
            op.voids.setdefault(group, []).extend(touched)
        op.writes = {}
        for request in list(self.requests):
            if any(grown is request for grown, _ in op.grown):
                self._preempt(request)
        op.open_messages = [row for row in op.open_messages if any(r.name == row.row for r in self.requests)]

    def _preempt(self, request: Request) -> None:
        """Gives all pages back; the request starts again under a new row."""
        if request.closing or any(request in load.opened for load in self.loads):
            return
        self._close(request)
        self._request += 1
        self.waiting.append(
            Request(
                name=f"r{self._request}",
                prompt=request.ids[: max(len(request.prompt), request.written)],
                target=max(1, len(request.prompt) + request.target - request.written),
                namespace=request.namespace,
                announces_ids=request.announces_ids,
            )
        )

    def _close(self, request: Request) -> None:
        request.closing = True
        self.requests.remove(request)
        if request.opened:
            self.pending_close.append(request.name)
        self._release_full(request)
        self._free_pages(SWA, request.window)

    def _register(self, request: Request) -> None:
        """Complete pages enter the prefix cache."""
        if not self.features.prefix_cache:
            return
        for index in range(request.written // PAGE):
            key = tuple(request.ids[: (index + 1) * PAGE])
            page = request.full[index]
            if key not in self.prefix and page not in self.key_of:
                self.prefix[key] = page
                self.key_of[page] = key

    def _dedup(self) -> list[Remap]:
        """Rows move to the cached copy of a page that they computed themselves."""
        remaps = []
        for request in self.requests:
            if not request.opened or request.scheduled != request.written or self.rng.random() < 0.5:
                continue
            for index in range(request.written // PAGE):
                page = request.full[index]
                other = self.prefix.get(tuple(request.ids[: (index + 1) * PAGE]))
                if other is None or other == page:
                    continue
                self.references[other] = self.references.get(other, 0) + 1
                request.full[index] = other
                self._unreference(page)
                remaps.append(Remap(row=request.name, group=FULL, start=index, pages=column(request.full[index:])))
        return remaps

    def _fork(self) -> tuple[list[Copies], list[RowOpen]]:
        """Copies the first pages of a row for a new one (beam search, parallel sampling)."""
        able = [r for r in self.requests if r.opened and r.written == r.scheduled and r.written > 0]
        if not able or len(self.requests) > 6 or self.ops:
            return [], []
        parent = able[int(self.rng.integers(len(able)))]
        count = -(-parent.written // PAGE)
        fresh, windows = self._take(FULL, count), self._take(SWA, 3) if self.features.window else []
        if fresh is None or windows is None:
            self._free_pages(FULL, fresh or [])
            self._free_pages(SWA, windows or [])
            return [], []
        self._request += 1
        child = Request(
            name=f"r{self._request}",
            prompt=list(parent.prompt),
            target=parent.target,
            namespace=parent.namespace,
            announces_ids=parent.announces_ids,
            tokens=list(parent.tokens),
            full=fresh,
            window=windows,
            written=parent.written,
            scheduled=parent.written,
            opened=True,
        )
        child.tokens = child.tokens[: max(0, parent.written - len(parent.prompt))]
        for page in fresh:
            self.references[page] = 1
        self.requests.append(child)
        moved = []
        for (group, mine), (_, theirs) in zip(self._tables(child), self._tables(parent), strict=True):
            sources, destinations = [], []
            for old, new in zip(theirs, mine, strict=False):
                for offset in range(PAGE):
                    sources.append(old * PAGE + offset)
                    destinations.append(new * PAGE + offset)
            # Copies are launched and complete before the op ends.
            self.memories[group][destinations] = self.memories[group][sources]
            moved.append(Copies(group=group, sources=column(sources), destinations=column(destinations)))
        return moved, [self._row(child, group) for group in self.groups]

    # --- pages --------------------------------------------------------------------------------------------------------

    def _take(self, group: int, count: int) -> list[int] | None:
        if group == FULL:
            idle = [page for page in self.key_of if not self.references.get(page)]
            while len(self.free[FULL]) < count and idle:
                self._evict(idle.pop(int(self.rng.integers(len(idle)))))
        if len(self.free[group]) < count:
            return None
        return [self.free[group].pop(int(self.rng.integers(len(self.free[group])))) for _ in range(count)]

    def _evict(self, page: int) -> None:
        del self.prefix[self.key_of.pop(page)]
        self.free[FULL].append(page)
        self.pending_freed[FULL].append(page)

    def _release_full(self, request: Request) -> None:
        for page in request.full:
            self._unreference(page)
        request.full = []

    def _unreference(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page] and page not in self.key_of:
            self._free_pages(FULL, [page])

    def _free_pages(self, group: int, freed: list[int]) -> None:
        if not freed:
            return
        self.free[group].extend(freed)
        self.pending_freed[group].extend(freed)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _scribble(self, group: int, slots: list[int]) -> None:
        self.memories[group][slots] = self.rng.integers(-(1 << 62), 1 << 62, size=(len(slots), WORDS))

    def _zero(self, group: int, pages: list[int]) -> None:
        for page in pages:
            self.memories[group][page * PAGE : (page + 1) * PAGE] = 0

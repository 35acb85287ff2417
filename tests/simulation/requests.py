"""What the simulated engine knows: requests, ops under way, pages, and what the stream was told of rows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from canaryd.client.facts import SnapshotState, page_set, row_open
from tests.simulation.features import PAGE
from tests.simulation.memory import FULL, I64


@dataclass(eq=False)
class Request:
    """`gpu_length`: tokens accepted on the device; `done`: those that the scheduler knows of; `scheduled`: an upper
    bound with all ops under way. `told`: its row is open in the stream."""

    name: str
    prompt: list[int]
    target: int
    hidden: bool
    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    gpu_length: int = 0
    done: int = 0
    scheduled: int = 0
    last_op: int = 0
    opening_op: int = 0
    told: bool = False

    @property
    def limit(self) -> int:
        """Length at which it ends."""
        return len(self.prompt) + self.target


@dataclass(eq=False)
class Segment:
    """Tokens of one request that one op writes; places are known when the device comes to it."""

    request: Request
    count: int
    pages: list[I64]
    first: int = 0
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Opening:
    """A row that an op's end opens."""

    request: Request
    pages: list[list[int]]
    length: int
    ids: list[int]
    copied: bool


@dataclass(eq=False)
class Op:
    """An op under way; it is the event behind its own last write, too."""

    number: int
    steps: deque[Callable[[], None]] = field(default_factory=deque)
    late_steps: int = 0
    status: str = "done"
    openings: list[Opening] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    writes: dict[int, list[tuple[Segment, I64, I64]]] = field(default_factory=dict)
    copies: list[tuple[int, I64, I64]] = field(default_factory=list)
    voids: dict[int, list[int]] = field(default_factory=dict)
    touched: set[tuple[int, int]] = field(default_factory=set)
    ended: bool = False

    def query(self) -> bool:
        """Whether the device is done with it."""
        return not self.steps

    @property
    def has_output(self) -> bool:
        """Whether the scheduler can read its tokens; a drafter may still write."""
        return len(self.steps) <= self.late_steps


class Pages:
    """Free pages and, in the full group, which complete pages a prefix cache knows."""

    def __init__(self, rng: random.Random, num_pages: list[int], *, shared: bool) -> None:
        self._rng = rng
        first = list(range(1, num_pages[0]))
        self.free = [first, *(first if shared else list(range(1, count)) for count in num_pages[1:])]
        self.references: dict[int, int] = {}
        self.prefix: dict[tuple[int, ...], int] = {}
        self.key_of: dict[int, tuple[int, ...]] = {}
        self.on_free: Callable[[int, int], None] = lambda group, page: None

    def take(self, group: int, count: int) -> list[int] | None:
        """`count` pages, evicting idle cached ones; None if there are not enough."""
        free = self.free[group]
        if len(free) < count and group == FULL:
            idle = [page for page in self.key_of if not self.references.get(page)]
            while len(free) < count and idle:
                page = idle.pop(self._rng.randrange(len(idle)))
                self.forget(page)
                self.give(FULL, page)
        if len(free) < count:
            return None
        taken = []
        for _ in range(count):
            index = self._rng.randrange(len(free))
            free[index], free[-1] = free[-1], free[index]
            taken.append(free.pop())
        if group == FULL:
            self.references.update(dict.fromkeys(taken, 1))
        return taken

    def give(self, group: int, page: int) -> None:
        """A page is free."""
        self.free[group].append(page)
        self.on_free(group, page)

    def release(self, page: int) -> None:
        """One holder less of a page of the full group; cached ones stay."""
        self.references[page] -= 1
        if not self.references[page]:
            del self.references[page]
            if page not in self.key_of:
                self.give(FULL, page)

    def hold(self, page: int) -> None:
        """One holder more."""
        self.references[page] = self.references.get(page, 0) + 1

    def register(self, ids: list[int], pages: list[int], first: int, last: int) -> None:
        """Complete pages `first` to `last` of a request enter the prefix cache, unless their prefix is there."""
        for index in range(first, last):
            key = tuple(ids[: (index + 1) * PAGE])
            if key not in self.prefix and pages[index] not in self.key_of:
                self.prefix[key] = pages[index]
                self.key_of[pages[index]] = key

    def hit(self, prompt: list[int]) -> list[int]:
        """Cached pages of a prompt, never all of it."""
        pages = []
        for end in range(PAGE, len(prompt), PAGE):
            page = self.prefix.get(tuple(prompt[:end]))
            if page is None:
                break
            pages.append(page)
        return pages

    def forget(self, page: int) -> bool:
        """The page leaves the prefix cache; whether it was in it."""
        key = self.key_of.pop(page, None)
        if key is not None:
            del self.prefix[key]
        return key is not None


@dataclass(eq=False)
class ToldRow:
    """A row as the stream has it so far."""

    request: Request
    pages: list[list[int]]
    length: int


class Told:
    """What the ends in the stream have said so far: a snapshot says the same."""

    def __init__(self) -> None:
        self.rows: dict[str, ToldRow] = {}

    def open(self, request: Request, pages: list[list[int]], length: int) -> None:
        """A row opened."""
        self.rows[request.name] = ToldRow(request, [list(of) for of in pages], length)

    def moved(self, name: str, start: int, pages: list[int]) -> None:
        """A row's pages were replaced from index `start` on; those before it may be told of later in the same end."""
        row = self.rows[name]
        known = row.pages[FULL]
        known.extend(row.request.pages[FULL][len(known) : start])
        known[start:] = pages

    def pages(self, name: str) -> list[int]:
        """All pages that a row holds."""
        row = self.rows.get(name)
        return [page for pages in row.pages for page in pages] if row else []

    def wrote(self, segment: Segment) -> None:
        """A segment's row grew."""
        row = self.rows.get(segment.request.name)
        if row is None:
            return
        row.length = segment.first + segment.accepted
        for group, pages in enumerate(segment.pages):
            known = row.pages[group]
            known.extend(pages.tolist()[len(known) :])

    def snapshot(self, cached: list[int]) -> SnapshotState:
        """All rows with what was written of them, and `cached` pages that no row holds."""
        rows = []
        held: set[int] = set()
        for name, row in self.rows.items():
            held.update(row.pages[FULL])
            request = row.request
            ids = [] if request.hidden else [*request.prompt, *request.tokens][: max(len(request.prompt), row.length)]
            for group, pages in enumerate(row.pages):
                rows.append(row_open(name, group, pages, row.length, ids=ids))
        idle = np.array([page for page in cached if page not in held], dtype=np.int64)
        return SnapshotState(rows=rows, cached=[page_set(FULL, idle)])

"""What an adapter says about its engine: the final set of an op and the state of a snapshot.

An engine's thread only copies what it is given; wire columns are made of it later, on the client's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Literal

from canaryd.client.columns import Ints, Kept, column, keep, kept_bytes, unkept
from canaryd.wire.messages import Copies, End, PageSet, Remap, RowOpen, Writes

Status = Literal["done", "failed", "aborted"]

Fact = tuple["_Kind", tuple[Any, ...], tuple[Kept, ...]]
"""A kind, its fields that are no columns, and its columns."""

_NAME_BYTES = 64
"""About what the name of a row costs while it waits."""
_FACT_BYTES = 128
"""About what a fact costs besides its columns while it waits."""


class Final:
    """The facts of one op. Of each kind they apply in the order in which they are told, the kinds in that of `End`.

    The methods copy what they are given, so the engine may reuse its buffers at once. They raise nothing into the
    engine: what cannot be told is kept as `problem`, and the client, which can no longer tell the truth, turns itself
    off at the op's end. What proves wrong when the message is made turns it off just so.
    """

    __slots__ = ("engine_ns", "facts", "problem", "size")

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.problem: Exception | None = None
        self.size = 0
        """About how many bytes the facts hold."""
        self.engine_ns = 0
        """Nanoseconds that telling took."""

    def write(  # noqa: PLR0917 - the order is that of the wire's `Writes`
        self, group: int, rows: list[str], counts: Ints, positions: Ints, tokens: Ints, slots: Ints
    ) -> None:
        """Tokens written: `counts[i]` consecutive entries of the columns belong to `rows[i]`."""
        # each step of an engine comes through here, on caches that its kernels' launches left cold: no loop, and
        # nothing touched that need not be
        started = perf_counter_ns()
        try:
            names = _names(rows)
            entries = keep(slots)
            columns = (keep(counts), keep(positions), keep(tokens), entries)
            self.facts.append((_WRITES, (group, names), columns))
            self.size += _FACT_BYTES + _NAME_BYTES * len(names) + 3 * kept_bytes(entries)
        except Exception as error:  # noqa: BLE001 - the promise to the engine; the client counts and logs it
            self.problem = self.problem or error
        self.engine_ns += perf_counter_ns() - started

    def close(self, row: str) -> None:
        """The row has ended, in every group."""
        self._tell(_CLOSED, (row,))

    def open(self, row: str, group: int, pages: Ints, length: int, *, namespace: int = 0, ids: Ints = b"") -> None:
        """A row opens in `group`: `pages` in row order, `length` tokens already in the pool, `ids` known from 0 on."""
        self._tell(_OPENED, (row, group, length, namespace), pages, ids)

    def remap(self, row: str, group: int, start: int, pages: Ints) -> None:
        """From page index `start` on the row's page list is replaced by `pages`."""
        self._tell(_REMAPS, (row, group, start), pages)

    def void(self, group: int, pages: Ints) -> None:
        """Pages handed out or zeroed: their content is undefined until it is written."""
        self._tell(_VOIDS, (group,), pages)

    def copy(self, group: int, sources: Ints, destinations: Ints) -> None:
        """Slots copied inside one group, all of its regions."""
        self._tell(_COPIES, (group,), sources, destinations)

    def free(self, group: int, pages: Ints) -> None:
        """Pages returned to the engine's allocator."""
        self._tell(_FREED, (group,), pages)

    def _tell(self, kind: _Kind, fields: tuple[Any, ...], *columns: Ints) -> None:
        started = perf_counter_ns()
        try:
            kept = tuple(map(keep, columns))
            self.facts.append((kind, fields, kept))
            self.size += _FACT_BYTES + sum(map(kept_bytes, kept))
        except Exception as error:  # noqa: BLE001 - as in write
            self.problem = self.problem or error
        self.engine_ns += perf_counter_ns() - started


def end_message(op: int, status: Status, facts: Sequence[Fact]) -> End:
    """The message of an op's end. Raises what `column` raises."""
    lists: dict[str, list[Any]] = {}
    for kind, fields, columns in facts:
        lists.setdefault(kind.list, []).append(kind.make(*fields, *map(unkept, columns)))
    return End(op=op, status=status, **lists)


@dataclass(frozen=True)
class _Kind:
    """A kind of fact: the list of `End` that it goes to, and its wire form from fields and columns."""

    list: str
    make: Callable[..., Any]


_CLOSED = _Kind("closed", lambda row: row)
_OPENED = _Kind(
    "opened",
    lambda row, group, length, namespace, pages, ids: RowOpen(
        row=row, group=group, pages=pages, length=length, namespace=namespace, ids=ids
    ),
)
_REMAPS = _Kind("remaps", lambda row, group, start, pages: Remap(row=row, group=group, start=start, pages=pages))
_VOIDS = _Kind("voids", lambda group, pages: PageSet(group=group, pages=pages))
_WRITES = _Kind(
    "writes",
    lambda group, rows, counts, positions, tokens, slots: Writes(
        group=group, rows=rows, counts=counts, positions=positions, tokens=tokens, slots=slots
    ),
)
_COPIES = _Kind(
    "copies",
    lambda group, sources, destinations: Copies(group=group, sources=sources, destinations=destinations),
)
_FREED = _Kind("freed", lambda group, pages: PageSet(group=group, pages=pages))


_last_names: list[str] = []


def _names(rows: list[str]) -> list[str]:
    """A copy of `rows` that nobody changes.

    Most steps of an engine name the same rows as the step before, and to compare references touches less memory than
    to take and later to drop hundreds of them.
    """
    global _last_names  # noqa: PLW0603 - one list, replaced as a whole
    names = _last_names
    if type(rows) is not list or rows != names:
        names = _last_names = list(rows)
    return names


@dataclass(kw_only=True)
class SnapshotState:
    """An engine's state at one moment: rows with all that was written, and pages of idle cached prefixes."""

    rows: list[RowOpen] = field(default_factory=list)
    cached: list[PageSet] = field(default_factory=list)


def row_open(row: str, group: int, pages: Ints, length: int, *, namespace: int = 0, ids: Ints = b"") -> RowOpen:
    """A `RowOpen` from any kind of integers."""
    return RowOpen(row=row, group=group, pages=column(pages), length=length, namespace=namespace, ids=column(ids))


def page_set(group: int, pages: Ints) -> PageSet:
    """A `PageSet` from any kind of integers."""
    return PageSet(group=group, pages=column(pages))

"""What an adapter says about its engine: the final set of an op and the state of a snapshot.

Columns of integers may be lists, `array.array`, numpy arrays, CPU tensors or memoryviews of any integer type, or raw
little-endian int64 as bytes. They are copied when the call is made, so the engine may reuse its buffers at once.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from canaryd.wire.messages import Copies, PageSet, Remap, RowOpen, Writes

T = TypeVar("T")
Ints = bytes | bytearray | memoryview | Iterable[int]


def column(values: Ints) -> bytes:
    """The values as a wire column: a copy, int64, little-endian, in C order.

    Raises TypeError for what is not integers, OverflowError for an integer of more than 64 bits, ValueError for raw
    bytes whose number is not a multiple of 8.
    """
    # numpy first: it is what an engine's step has, and this runs on the engine's thread
    code = getattr(getattr(values, "dtype", None), "str", None)
    if code == "<i8":
        return values.tobytes()  # type: ignore[union-attr]
    if code is not None:
        return _from_array(values, code)
    if isinstance(values, (bytes, bytearray)):
        return _raw(bytes(values))
    if isinstance(values, memoryview):
        return _raw(values.tobytes()) if values.format == "B" else _from_integers(values.tolist())
    numpy = getattr(values, "numpy", None)
    if numpy is not None:
        return column(numpy())  # a tensor: not on a GPU, or it raises TypeError
    return _from_integers(values)


def _from_integers(values: Iterable[int]) -> bytes:
    return array.array("q", values).tobytes()


def _raw(data: bytes) -> bytes:
    if len(data) % 8:
        raise ValueError(f"raw columns hold 8 bytes per value, got {len(data)} bytes")
    return data


def _from_array(values: Any, code: str) -> bytes:
    if code[1] not in "iu":
        raise TypeError(f"columns hold integers, got an array of {code}")
    return _from_integers(values.reshape(-1).tolist())


@dataclass(kw_only=True, slots=True)
class Final:
    """The facts of one op, in the order in which the daemon applies them.

    Fill it with the methods below, or give wire structs whose columns are bytes. The methods raise nothing into the
    engine: what cannot be told is kept as `problem`, and the client, which can no longer tell the truth, turns itself
    off at the op's end.
    """

    closed: list[str] = field(default_factory=list)
    opened: list[RowOpen] = field(default_factory=list)
    remaps: list[Remap] = field(default_factory=list)
    voids: list[PageSet] = field(default_factory=list)
    writes: list[Writes] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    freed: list[PageSet] = field(default_factory=list)
    problem: Exception | None = None

    def _tell(self, facts: list[T], make: Callable[[], T]) -> None:
        try:
            facts.append(make())
        except Exception as error:  # noqa: BLE001 - the promise to the engine; the client counts and logs it
            self.problem = self.problem or error

    def close(self, row: str) -> None:
        """The row has ended, in every group."""
        self.closed.append(row)

    def open(self, row: str, group: int, pages: Ints, length: int, *, namespace: int = 0, ids: Ints = b"") -> None:
        """A row opens in `group`: `pages` in row order, `length` tokens already in the pool, `ids` known from 0 on."""
        self._tell(self.opened, lambda: row_open(row, group, pages, length, namespace=namespace, ids=ids))

    def remap(self, row: str, group: int, start: int, pages: Ints) -> None:
        """From page index `start` on the row's page list is replaced by `pages`."""
        self._tell(self.remaps, lambda: Remap(row=row, group=group, start=start, pages=column(pages)))

    def void(self, group: int, pages: Ints) -> None:
        """Pages handed out or zeroed: their content is undefined until it is written."""
        self._tell(self.voids, lambda: page_set(group, pages))

    def write(  # noqa: PLR0917 - the order is that of the wire's `Writes`
        self, group: int, rows: list[str], counts: Ints, positions: Ints, tokens: Ints, slots: Ints
    ) -> None:
        """Tokens written: `counts[i]` consecutive entries of the columns belong to `rows[i]`."""
        self._tell(
            self.writes,
            lambda: Writes(
                group=group,
                rows=list(rows),
                counts=column(counts),
                positions=column(positions),
                tokens=column(tokens),
                slots=column(slots),
            ),
        )

    def copy(self, group: int, sources: Ints, destinations: Ints) -> None:
        """Slots copied inside one group, all of its regions."""
        self._tell(
            self.copies,
            lambda: Copies(group=group, sources=column(sources), destinations=column(destinations)),
        )

    def free(self, group: int, pages: Ints) -> None:
        """Pages returned to the engine's allocator."""
        self._tell(self.freed, lambda: page_set(group, pages))


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

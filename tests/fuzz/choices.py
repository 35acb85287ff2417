"""From bytes that a fuzzer mutates to messages: well typed, and wrong in every other way."""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import TypeVar

from canaryd.wire.messages import (
    Attach,
    Beat,
    Begin,
    Copies,
    CudaIpcMemory,
    End,
    GroupSpec,
    HostShmMemory,
    Identity,
    PageSet,
    RegionSpec,
    Remap,
    RowOpen,
    Snapshot,
    ToDaemon,
    Writes,
)

Choice = TypeVar("Choice")

_EDGES = (-1, 0, 1, 3, 4, 15, 16, 63, 64, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))


class Choices:
    """Reads decisions off `data`; when it is used up, every decision is 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    @property
    def used_up(self) -> bool:
        return self._at >= len(self._data)

    def pick(self, values: Sequence[Choice]) -> Choice:
        return values[self.byte() % len(values)]

    def number(self) -> int:
        """Mostly small, sometimes at an edge."""
        first = self.byte()
        return first % 64 if first < 224 else _EDGES[first % len(_EDGES)]

    def column(self, length: int | None = None) -> bytes:
        """Int64 values, and now and then bytes that are none."""
        if length is None:
            length = self.byte() % 12
        column = array.array("q", [self.number() for _ in range(length)]).tobytes()
        return column[:-3] if self.byte() == 255 else column

    def run(self) -> bytes:
        """Consecutive values, as positions and slots mostly are."""
        first = self.number()
        if not 0 <= first < 1 << 62:
            return self.column()
        return array.array("q", range(first, first + self.byte() % 12)).tobytes()

    def row(self) -> str:
        return self.pick(("a", "b", "c", "d", "e", "", "n" * 300))

    def some(self, make: object) -> list[object]:
        return [make() for _ in range(self.byte() % 3)]  # type: ignore[operator]

    def group(self) -> int:
        return self.pick((0, 0, 0, 1, 1, 2, -1, 63, 64))

    def page_set(self) -> PageSet:
        return PageSet(group=self.group(), pages=self.pick((self.column, self.run))())

    def row_open(self) -> RowOpen:
        return RowOpen(
            row=self.row(),
            group=self.group(),
            pages=self.pick((self.column, self.run))(),
            length=self.number(),
            namespace=self.number(),
            ids=self.column(),
        )

    def remap(self) -> Remap:
        return Remap(row=self.row(), group=self.group(), start=self.number(), pages=self.column())

    def writes(self) -> Writes:
        slots, positions = self.run(), self.run()
        length = min(len(slots), len(positions)) // 8
        if self.byte() < 240:
            slots, positions = slots[: 8 * length], positions[: 8 * length]
        cut = self.byte() % (length + 1)
        counts = array.array("q", [cut, length - cut]).tobytes() if self.byte() < 240 else self.column()
        return Writes(
            group=self.group(),
            rows=[self.row(), self.row()],
            counts=counts,
            positions=positions,
            tokens=self.column(length),
            slots=slots,
        )

    def copies(self) -> Copies:
        sources = self.column()
        return Copies(group=self.group(), sources=sources, destinations=self.column(len(sources) // 8))

    def begin(self) -> Begin:
        scope = self.some(self.page_set) if self.byte() % 2 else None
        return Begin(op=self.number(), lane=self.pick(("main", "load", "")), scope=scope)  # type: ignore[arg-type]

    def end(self) -> End:
        return End(
            op=self.number(),
            status=self.pick(("done", "done", "failed", "aborted")),  # type: ignore[arg-type]
            closed=self.some(self.row),  # type: ignore[arg-type]
            opened=self.some(self.row_open),  # type: ignore[arg-type]
            remaps=self.some(self.remap),  # type: ignore[arg-type]
            voids=self.some(self.page_set),  # type: ignore[arg-type]
            writes=self.some(self.writes),  # type: ignore[arg-type]
            copies=self.some(self.copies),  # type: ignore[arg-type]
            freed=self.some(self.page_set),  # type: ignore[arg-type]
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(
            open_ops=self.some(self.begin),  # type: ignore[arg-type]
            rows=self.some(self.row_open),  # type: ignore[arg-type]
            cached=self.some(self.page_set),  # type: ignore[arg-type]
        )

    def size(self) -> int:
        """A size, offset or stride in bytes: mostly whole words."""
        first = self.byte()
        return (first % 33) * 4 if first < 192 else self.number() * self.pick((1, 4, 16, 64))

    def region(self) -> RegionSpec:
        return RegionSpec(
            name=self.pick(("k", "v", "")),
            memory=self.pick((0, 0, 0, 1, -1, 8192)),
            offset=self.size(),
            page_stride=self.size(),
            slot_stride=self.size(),
            piece_bytes=self.size(),
            pieces=self.pick((1, 1, 2, 3, 0, 1 << 16)),
            piece_stride=self.size(),
            dtype=self.pick(("uint8", "bfloat16", "float8_e4m3fn", "?")),
        )

    def group_spec(self) -> GroupSpec:
        return GroupSpec(
            name=self.pick(("full", "sliding", "")),
            num_pages=self.number(),
            page_size=self.pick((1, 2, 4, 16, 0)),
            regions=[self.region() for _ in range(1 + self.byte() % 3)],
            reserved=[(self.number(), self.number())] if self.byte() % 4 == 1 else [],
            holes_ok=bool(self.byte() % 2),
            ring=self.pick((0, 0, 4, -1)),
            table=self.pick(("announced", "announced", "announced", "device")),  # type: ignore[arg-type]
        )

    def attach(self) -> Attach:
        host = HostShmMemory(fd_index=self.pick((1, 1, 2, 0, 128)), offset=self.size(), size=self.pick((4096, 4096, 0)))
        cuda = CudaIpcMemory(handle=bytes(self.pick((64, 63))), offset=self.size(), size=4096, gpu_uuid="GPU-1")
        return Attach(
            identity=Identity(engine=self.pick(("engine", "")), tp=self.number()),
            engine_kind="fuzz",
            engine_version="1",
            client_version="1",
            memories=[host, cuda][: self.pick((1, 1, 2, 0))],
            groups=[self.group_spec() for _ in range(self.pick((1, 1, 2, 0)))],
            scheme=self.pick((None, "native", "sglang")),  # type: ignore[arg-type]
        )

    def message(self) -> ToDaemon:
        make = self.pick((self.end, self.end, self.begin, self.begin, self.snapshot, self.attach))
        return Beat(engine_ns=self.byte()) if self.byte() == 255 else make()

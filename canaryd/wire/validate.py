"""Structural validation of decoded messages: what types alone do not say, and nothing that needs an attachment.

Whether a group, page or slot exists is known only with the attachment, and is checked where that is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from canaryd.errors import MalformedFrame, OversizedFrame
from canaryd.wire import limits
from canaryd.wire.messages import (
    Attach,
    Attached,
    Beat,
    Begin,
    Copies,
    CudaIpcMemory,
    End,
    Finding,
    GroupSpec,
    Hello,
    Memory,
    PageSet,
    Refused,
    RegionSpec,
    Rejected,
    Remap,
    Resync,
    RowOpen,
    Snapshot,
    WhoAreYou,
    Writes,
)


def validate(message: object) -> None:
    """Check one decoded message.

    Raises:
        OversizedFrame: a list, column or text is longer than its bound.
        MalformedFrame: a number is out of range, or fields contradict each other.
    """
    match message:
        case End():
            _end(message)
        case Begin():
            _begin(message)
        case Beat():
            pass
        case Snapshot():
            _snapshot(message)
        case Attach():
            _attach(message)
        case Hello():
            _hello(message)
        case _:
            _answer(message)


def _answer(message: object) -> None:
    match message:
        case WhoAreYou():
            pass
        case Attached():
            _text("scheme", message.scheme, limits.MAX_NAME_CHARS)
            if not 0.0 <= message.described_ratio <= 1.0:
                raise MalformedFrame(f"described_ratio must be between 0 and 1, got {message.described_ratio}")
        case Refused():
            _text("reason", message.reason, limits.MAX_NAME_CHARS)
            _text("cause", message.cause, limits.MAX_TEXT_CHARS)
            _text("remedy", message.remedy, limits.MAX_TEXT_CHARS)
        case Resync():
            _text("cause", message.cause, limits.MAX_TEXT_CHARS)
        case Rejected():
            _integer("seq", message.seq, 0, limits.MAX_SEQUENCE)
            _text("reason", message.reason, limits.MAX_NAME_CHARS)
            _text("detail", message.detail, limits.MAX_TEXT_CHARS)
        case Finding():
            _finding(message)
        case _:
            raise MalformedFrame(f"{type(message).__name__} is not a message")


def _finding(finding: Finding) -> None:
    for name in ("id", "check", "group"):
        _text(name, getattr(finding, name), limits.MAX_NAME_CHARS, empty=False)
    _text("row", finding.row, limits.MAX_NAME_CHARS)
    _length("slots", finding.slots, limits.MAX_FINDING_RANGES)
    _integer("slot_count", finding.slot_count, 0, limits.MAX_SLOTS)
    for first, last in finding.slots:
        if first > last:
            raise MalformedFrame(f"a range of slots must not end before it begins, got {first} to {last}")


def _integer(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise MalformedFrame(f"{name} must be between {low} and {high}, got {value}")


def _text(name: str, value: str, high: int, *, empty: bool = True) -> None:
    if len(value) > high:
        raise OversizedFrame(f"{name} has at most {high} characters, got {len(value)}")
    if not empty and not value:
        raise MalformedFrame(f"{name} must not be empty")


def _length(name: str, values: Sized, high: int) -> None:
    if len(values) > high:
        raise OversizedFrame(f"{name} has at most {high} entries, got {len(values)}")


def _column(name: str, column: bytes) -> int:
    """Entries of the column."""
    if len(column) % 8:
        raise MalformedFrame(f"{name} must have a multiple of 8 bytes, got {len(column)}")
    if len(column) > 8 * limits.MAX_COLUMN_ENTRIES:
        raise OversizedFrame(f"{name} has at most {limits.MAX_COLUMN_ENTRIES} entries, got {len(column) // 8}")
    return len(column) // 8


def _row(row: str) -> None:
    _text("row", row, limits.MAX_NAME_CHARS, empty=False)


def _group(group: int) -> None:
    _integer("group", group, 0, limits.MAX_GROUPS - 1)


def _page_sets(name: str, sets: Sequence[PageSet]) -> int:
    """Pages in all sets."""
    _length(name, sets, limits.MAX_RECORDS)
    pages = 0
    for pageset in sets:
        _group(pageset.group)
        pages += _column(f"{name}.pages", pageset.pages)
    return pages


def _rows_opened(name: str, rows: Sequence[RowOpen]) -> None:
    _length(name, rows, limits.MAX_ROWS)
    for row in rows:
        _row(row.row)
        _group(row.group)
        _column(f"{name}.pages", row.pages)
        _column(f"{name}.ids", row.ids)
        _integer(f"{name}.length", row.length, 0, limits.MAX_SLOTS)
        _integer(f"{name}.namespace", row.namespace, limits.INT64_MIN, limits.INT64_MAX)


def _begin(begin: Begin) -> None:
    _integer("op", begin.op, 0, limits.INT64_MAX)
    _text("lane", begin.lane, limits.MAX_NAME_CHARS, empty=False)
    if begin.scope is not None:
        pages = _page_sets("scope", begin.scope)
        if pages > limits.MAX_SCOPE_PAGES:
            raise OversizedFrame(f"a scope has at most {limits.MAX_SCOPE_PAGES} pages, got {pages}")


def _end(end: End) -> None:
    _integer("op", end.op, 0, limits.INT64_MAX)
    _length("closed", end.closed, limits.MAX_ROWS)
    for row in end.closed:
        _row(row)
    _rows_opened("opened", end.opened)
    _length("remaps", end.remaps, limits.MAX_ROWS)
    for remap in end.remaps:
        _remap(remap)
    _page_sets("voids", end.voids)
    _length("writes", end.writes, limits.MAX_RECORDS)
    for writes in end.writes:
        _writes(writes)
    _length("copies", end.copies, limits.MAX_RECORDS)
    for copies in end.copies:
        _copies(copies)
    _page_sets("freed", end.freed)


def _remap(remap: Remap) -> None:
    _row(remap.row)
    _group(remap.group)
    _integer("remaps.start", remap.start, 0, limits.MAX_SLOTS)
    _column("remaps.pages", remap.pages)


def _writes(writes: Writes) -> None:
    _group(writes.group)
    _length("writes.rows", writes.rows, limits.MAX_ROWS)
    for row in writes.rows:
        _row(row)
    if _column("writes.counts", writes.counts) != len(writes.rows):
        raise MalformedFrame("writes.counts must have one entry for each row")
    entries = _column("writes.slots", writes.slots)
    if _column("writes.positions", writes.positions) != entries or _column("writes.tokens", writes.tokens) != entries:
        raise MalformedFrame("writes.positions, tokens and slots must have equal lengths")
    total = 0
    for count in memoryview(writes.counts).cast("q"):
        if count < 0:
            raise MalformedFrame(f"writes.counts must not be negative, got {count}")
        total += count
    if total != entries:
        raise MalformedFrame(f"writes.counts must sum to the {entries} entries of the columns, got {total}")


def _copies(copies: Copies) -> None:
    _group(copies.group)
    if _column("copies.sources", copies.sources) != _column("copies.destinations", copies.destinations):
        raise MalformedFrame("copies.sources and destinations must have equal lengths")


def _snapshot(snapshot: Snapshot) -> None:
    _length("open_ops", snapshot.open_ops, limits.MAX_OPEN_OPS)
    for begin in snapshot.open_ops:
        _begin(begin)
    if len({begin.op for begin in snapshot.open_ops}) != len(snapshot.open_ops):
        raise MalformedFrame("open_ops must not name an op twice")
    _rows_opened("rows", snapshot.rows)
    _page_sets("cached", snapshot.cached)


def _hello(hello: Hello) -> None:
    if len(hello.session) != limits.SESSION_BYTES:
        raise MalformedFrame(f"a session has {limits.SESSION_BYTES} bytes, got {len(hello.session)}")
    _integer("fds", hello.fds, 1, limits.MAX_FDS)


def _attach(attach: Attach) -> None:
    identity = attach.identity
    _text("identity.engine", identity.engine, limits.MAX_NAME_CHARS, empty=False)
    for name in ("dp", "pp", "tp", "cp"):
        _integer(f"identity.{name}", getattr(identity, name), 0, limits.MAX_RANK)
    for name in ("engine_kind", "engine_version", "client_version"):
        _text(name, getattr(attach, name), limits.MAX_NAME_CHARS)
    _text("model", attach.model, limits.MAX_TEXT_CHARS)
    _length("memories", attach.memories, limits.MAX_MEMORIES)
    for memory in attach.memories:
        _memory(memory)
    _length("groups", attach.groups, limits.MAX_GROUPS)
    if not attach.memories or not attach.groups:
        raise MalformedFrame("an attachment needs at least one memory and one group")
    for group in attach.groups:
        _group_spec(group)
    if len({group.name for group in attach.groups}) != len(attach.groups):
        raise MalformedFrame("groups must have different names")
    regions = sum(len(group.regions) for group in attach.groups)
    if regions > limits.MAX_REGIONS:
        raise OversizedFrame(f"an attachment has at most {limits.MAX_REGIONS} regions, got {regions}")


def _memory(memory: Memory) -> None:
    _integer("memories.offset", memory.offset, 0, limits.MAX_BYTES)
    _integer("memories.size", memory.size, 1, limits.MAX_BYTES)
    if isinstance(memory, CudaIpcMemory):
        if len(memory.handle) != limits.HANDLE_BYTES:
            raise MalformedFrame(f"memories.handle has {limits.HANDLE_BYTES} bytes, got {len(memory.handle)}")
        _text("memories.gpu_uuid", memory.gpu_uuid, limits.MAX_NAME_CHARS, empty=False)
        _integer("memories.generation", memory.generation, 0, limits.INT64_MAX)
    else:
        # number 0 is the announce page
        _integer("memories.fd_index", memory.fd_index, 1, limits.MAX_FDS - 1)


def _group_spec(group: GroupSpec) -> None:
    _text("groups.name", group.name, limits.MAX_NAME_CHARS, empty=False)
    _integer("groups.num_pages", group.num_pages, 1, limits.MAX_SLOTS)
    _integer("groups.page_size", group.page_size, 1, limits.MAX_SLOTS)
    _integer("slots of a group", group.num_pages * group.page_size, 1, limits.MAX_SLOTS)
    _integer("groups.ring", group.ring, 0, limits.MAX_SLOTS)
    _length("groups.reserved", group.reserved, limits.MAX_RESERVED_RANGES)
    for start, stop in group.reserved:
        if not 0 <= start < stop <= limits.MAX_SLOTS:
            raise MalformedFrame(f"a reserved range must be 0 <= start < stop, got {start} and {stop}")
    _length("groups.regions", group.regions, limits.MAX_REGIONS_PER_GROUP)
    if not group.regions:
        raise MalformedFrame("a group needs at least one region")
    for region in group.regions:
        _region(region)


def _region(region: RegionSpec) -> None:
    _text("regions.name", region.name, limits.MAX_NAME_CHARS, empty=False)
    _text("regions.dtype", region.dtype, limits.MAX_NAME_CHARS)
    _integer("regions.memory", region.memory, 0, limits.MAX_MEMORIES - 1)
    for name in ("offset", "page_stride", "slot_stride", "piece_stride"):
        _integer(f"regions.{name}", getattr(region, name), 0, limits.MAX_BYTES)
    _integer("regions.piece_bytes", region.piece_bytes, 1, limits.MAX_BYTES)
    _integer("regions.pieces", region.pieces, 1, limits.MAX_PIECES)
    _integer("regions.layer", region.layer, -1, limits.MAX_REGIONS)

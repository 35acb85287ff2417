"""The messages between an engine's client and the daemon.

Typed msgspec structs, encoded as msgpack maps. Columns of integers travel as raw little-endian int64 bytes
(`Column`), so that an engine hands over a buffer and nobody loops in Python. Nothing here imports torch or numpy.

Slots are numbered `page * page_size + offset` inside a group; pages are numbered 0 to `num_pages - 1`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Column = bytes
"""Little-endian int64 values, 8 bytes each."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every wire struct: immutable, keyword-only, strict."""


# --- attach ---------------------------------------------------------------------------------------------------------


class Identity(_Record, frozen=True):
    """Who is speaking: one rank of one engine."""

    engine: str
    dp: int = 0
    pp: int = 0
    tp: int = 0
    cp: int = 0


class CudaIpcMemory(_Record, tag="cuda_ipc", tag_field="kind", frozen=True):
    """GPU memory by raw CUDA IPC handle.

    `handle` is the 64-byte handle of the allocation's base; the memory described is `size` bytes that start
    `offset` bytes behind that base. `gpu_uuid` is the GPU's (or MIG device's) UUID as NVML prints it.
    """

    handle: bytes
    offset: int
    size: int
    gpu_uuid: str
    generation: int = 0


class HostShmMemory(_Record, tag="host_shm", tag_field="kind", frozen=True):
    """Host shared memory by file descriptor, number `fd_index` of those sent on the side connection.

    The memory described is `size` bytes that start `offset` bytes into the file.
    """

    fd_index: int
    offset: int
    size: int


Memory = CudaIpcMemory | HostShmMemory


class RegionSpec(_Record, frozen=True):
    """One strided piece of a group: for each slot `pieces * piece_bytes` bytes.

    Byte address of piece i of slot (page p, offset o): `memory + offset + p*page_stride + o*slot_stride +
    i*piece_stride`. All sizes and strides in bytes, multiples of 4.
    """

    name: str
    memory: int
    offset: int
    page_stride: int
    slot_stride: int
    piece_bytes: int
    pieces: int = 1
    piece_stride: int = 0
    dtype: str = "uint8"
    layer: int = -1
    part: Literal["k", "v", "kv", "scale", "index", "state"] = "kv"


class GroupSpec(_Record, frozen=True):
    """Slots that share one index space.

    `reserved` are half-open slot ranges that may be written and must not be owned. `ring` > 0: position p of a
    row lives at ring index `p % ring` of its pages. `table`: whether rows are announced or read on the device.
    """

    name: str
    num_pages: int
    page_size: int
    regions: list[RegionSpec]
    reserved: list[tuple[int, int]] = []
    holes_ok: bool = False
    ring: int = 0
    table: Literal["announced", "device"] = "announced"


class Attach(_Record, tag="attach", tag_field="kind", frozen=True):
    """First message of a session."""

    identity: Identity
    engine_kind: str
    engine_version: str
    client_version: str
    memories: list[Memory]
    groups: list[GroupSpec]
    model: str = ""
    scheme: Literal["native", "sglang"] | None = None
    frees: bool = False
    tiers: Literal["none", "announced", "opaque"] = "opaque"


# --- the stream -----------------------------------------------------------------------------------------------------


class PageSet(_Record, frozen=True):
    """Pages of one group."""

    group: int
    pages: Column


class RowOpen(_Record, frozen=True):
    """A row that opens, or a row of a snapshot, in one group.

    `pages` in row order cover at least positions 0 to `length - 1`; `length` tokens are already in the pool
    (a prefix hit, or in a snapshot all that was written). `ids`, if not empty, are the row's known token ids from
    position 0 on; they may reach beyond `length` (the rest of a prompt).
    """

    row: str
    group: int
    pages: Column
    length: int
    namespace: int = 0
    ids: Column = b""


class Remap(_Record, frozen=True):
    """The row's page list is, from page index `start` on, replaced by `pages`."""

    row: str
    group: int
    start: int
    pages: Column


class Writes(_Record, frozen=True):
    """Tokens written in one group: `counts[i]` consecutive entries of the columns belong to `rows[i]`."""

    group: int
    rows: list[str]
    counts: Column
    positions: Column
    tokens: Column
    slots: Column


class Copies(_Record, frozen=True):
    """Slots copied inside one group, all of the group's regions."""

    group: int
    sources: Column
    destinations: Column


class Begin(_Record, tag="begin", tag_field="kind", frozen=True):
    """Sent before an op may write anything. `scope` None: it may write anywhere."""

    op: int
    lane: str = "main"
    scope: list[PageSet] | None = None


class End(_Record, tag="end", tag_field="kind", frozen=True):
    """Sent after the op's last write is complete. The lists apply in the order in which they stand here."""

    op: int
    status: Literal["done", "failed", "aborted"] = "done"
    closed: list[str] = []
    opened: list[RowOpen] = []
    remaps: list[Remap] = []
    voids: list[PageSet] = []
    writes: list[Writes] = []
    copies: list[Copies] = []
    freed: list[PageSet] = []


class Snapshot(_Record, tag="snapshot", tag_field="kind", frozen=True):
    """The engine's whole state at this point of the stream, in answer to `Resync`.

    `cached` are pages outside every row whose content is still in use (idle cached prefixes).
    """

    open_ops: list[Begin]
    rows: list[RowOpen]
    cached: list[PageSet]


class Beat(_Record, tag="beat", tag_field="kind", frozen=True):
    """Liveness, and what the client costs; not numbered.

    `engine_ns`: nanoseconds that the engine's threads spent in the client so far.
    """

    engine_ns: Annotated[int, msgspec.Meta(ge=0)] = 0


ToDaemon = Attach | Begin | End | Snapshot | Beat


# --- answers --------------------------------------------------------------------------------------------------------


class Attached(_Record, tag="attached", tag_field="kind", frozen=True):
    """The attachment stands. `described_ratio`: share of the memory that regions describe (0 to 1)."""

    described_ratio: float
    scheme: str


class Refused(_Record, tag="refused", tag_field="kind", frozen=True):
    """The attachment was refused; the client tries again later, at low cost."""

    reason: str
    cause: str
    remedy: str


class Resync(_Record, tag="resync", tag_field="kind", frozen=True):
    """Please send a `Snapshot`."""

    cause: str


class WhoAreYou(_Record, tag="who_are_you", tag_field="kind", frozen=True):
    """This session is not known: attach again."""


class Rejected(_Record, tag="rejected", tag_field="kind", frozen=True):
    """Frame number `seq` was not accepted."""

    seq: int
    reason: str
    detail: str


class Finding(_Record, tag="finding", tag_field="kind", frozen=True):
    """Corruption was confirmed in this session's pool.

    `id` and `check` as in the daemon's findings, `group` the group's name. `slots` are inclusive [first, last] ranges
    of the `slot_count` damaged slots; where there are too many to name, they cover fewer. `row` held the first slot,
    "" if none did. One finding may be told again when it grows.
    """

    id: str
    check: str
    group: str
    slots: list[tuple[int, int]]
    slot_count: int
    row: str = ""


ToEngine = Attached | Refused | Resync | WhoAreYou | Rejected | Finding


# --- the side connection --------------------------------------------------------------------------------------------


class Hello(_Record, tag="hello", tag_field="kind", frozen=True):
    """First datagram on the side connection. Its ancillary data carries file descriptors: number 0 is the
    announce page; `HostShmMemory.fd_index` counts in the same list, so the first pool has number 1."""

    session: bytes
    fds: int


class Welcome(_Record, tag="welcome", tag_field="kind", frozen=True):
    """The side connection stands."""


SideAnswer = Welcome | Refused

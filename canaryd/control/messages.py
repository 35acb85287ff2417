"""Messages between the supervisor and its workers, as msgpack on a `Channel`.

Both ends are the same release of this package and belong to the same user; the types are still checked, so that a
mistake shows where it is made.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from canaryd.wire.messages import Refused

HOST = "host"
"""The device of pools in host memory; also their `gpu_uuid` label."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every control message."""


# --- what a worker is told ------------------------------------------------------------------------------------------


class WorkerSettings(_Message, frozen=True):
    """How a worker is to work. `device`: a GPU's UUID or "host"; times in seconds."""

    device: str
    backend: Literal["reference", "triton"] | None
    scheme: Literal["native", "sglang"]
    nice: int
    tick: float
    busy_share: float
    max_age_live: float
    max_age_idle: float
    bytes_per_burst: int
    selftest_interval: float
    log_format: Literal["text", "json"]
    log_level: str


class Ping(_Message, tag="ping", frozen=True):
    """Answer with a `Pong` of the same number from the main loop."""

    number: int


class Map(_Message, tag="map", frozen=True):
    """Attach a pool: `body` is the engine's `Attach` as it came; the frame's descriptors are the side
    connection's, the announce page first."""

    session: bytes
    engine: str
    body: bytes


class Frame(_Message, tag="frame", frozen=True):
    """One accepted frame of an attached session's stream, as it came."""

    session: bytes
    seq: int
    body: bytes


class Detach(_Message, tag="detach", frozen=True):
    """The session ended: close its mappings now."""

    session: bytes
    cause: str


class Explain(_Message, tag="explain", frozen=True):
    """What is known about one slot?"""

    request: int
    session: bytes
    group: str
    slot: int


class Stop(_Message, tag="stop", frozen=True):
    """Close every mapping and end."""


ToWorker = Ping | Map | Frame | Detach | Explain | Stop


# --- what a worker tells --------------------------------------------------------------------------------------------


class Series(_Message, array_like=True, frozen=True):
    """One value of one metric. `labels` are the values of the family's own labels, in its order."""

    name: str
    labels: tuple[str, ...]
    value: float


class Distribution(_Message, array_like=True, frozen=True):
    """A histogram: `counts[i]` observations fell into the bucket that ends at `bounds[i]` (the last one: above all
    bounds); not cumulative. `total` is the sum of the observed values."""

    name: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Ready(_Message, tag="ready", frozen=True):
    """The worker's device state stands; pools can be attached."""

    backend: str
    description: str


class Pong(_Message, tag="pong", frozen=True):
    """The main loop came around after `Ping` of this number."""

    number: int


class Slow(_Message, tag="slow", frozen=True):
    """What follows may compile kernels: until the next message the patience of a start applies."""


class Mapped(_Message, tag="mapped", frozen=True):
    """The pool is attached. `slots` and `size` (bytes) describe it for logs and the status document."""

    session: bytes
    described_ratio: float
    scheme: str
    slots: int
    size: int


class NotMapped(_Message, tag="not_mapped", frozen=True):
    """The pool was refused; pass the reason on to the client."""

    session: bytes
    refused: Refused


class Unmapped(_Message, tag="unmapped", frozen=True):
    """The session's mappings are closed."""

    session: bytes


class NeedSnapshot(_Message, tag="need_snapshot", frozen=True):
    """Ask the client for a snapshot."""

    session: bytes
    cause: str


class Found(_Message, tag="found", frozen=True):
    """Confirmed findings of one session: (check, detail)."""

    session: bytes
    findings: list[tuple[str, dict[str, Any]]]


class Report(_Message, tag="report", frozen=True):
    """What one session's counters, gauges and histograms stand at, since it was attached."""

    session: bytes
    counters: list[Series]
    gauges: list[Series]
    distributions: list[Distribution]


class WorkerReport(_Message, tag="worker_report", frozen=True):
    """What the worker's own counters and gauges stand at, since it was started."""

    counters: list[Series]
    gauges: list[Series]
    rss_bytes: int


class Explained(_Message, tag="explained", frozen=True):
    """The answer to `Explain`; `error` if there is none."""

    request: int
    document: dict[str, Any] | None = None
    error: str | None = None


FromWorker = (
    Ready | Pong | Slow | Mapped | NotMapped | Unmapped | NeedSnapshot | Found | Report | WorkerReport | Explained
)


_ENCODER = msgspec.msgpack.Encoder()
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """The message as the body of a channel frame."""
    return _ENCODER.encode(message)


def decode_to_worker(body: bytes) -> ToWorker:
    """A message for a worker. Raises msgspec.MsgspecError."""
    return _TO_WORKER.decode(body)


def decode_from_worker(body: bytes) -> FromWorker:
    """A message from a worker. Raises msgspec.MsgspecError."""
    return _FROM_WORKER.decode(body)

"""The exception tree. Each leaf has a stable `reason`, which is also a metric label value.

CanarydError
├── ConfigError                 configuration is invalid; `serve` ends with status 2
├── WireError                   a frame that is counted, answered with its reason, and never acted on
│   ├── MalformedFrame          reason "malformed"
│   ├── OversizedFrame          reason "oversized"
│   ├── UnknownVersion          reason "unknown_version"
│   ├── UnknownSession          reason "unknown_session"
│   └── OutOfOrder              reason "out_of_order"
├── AttachRefused               carries a `RefusalReason`, the cause and the remedy
├── CacheDamaged                a request read damaged KV; its engine fails it with this
├── BackendError                the device failed a burst; the worker is replaced
└── WorkerError                 a worker did not start, answer or stop as it must
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class CanarydError(Exception):
    """Base of every error that canaryd raises on purpose."""

    reason: ClassVar[str] = "error"


class ConfigError(CanarydError):
    """A configuration file, key or environment variable is invalid."""

    reason = "config"


class WireError(CanarydError):
    """A frame from an engine that cannot be accepted. `reason` labels the rejection counter."""

    reason = "wire"


class MalformedFrame(WireError):
    """The frame does not decode, or its fields contradict each other."""

    reason = "malformed"


class OversizedFrame(WireError):
    """The frame, or one of its lists, is larger than the documented limit."""

    reason = "oversized"


class UnknownVersion(WireError):
    """The frame was written by a protocol version that this daemon does not speak."""

    reason = "unknown_version"


class UnknownSession(WireError):
    """The frame belongs to a session that this daemon does not know; the client must attach again."""

    reason = "unknown_session"


class OutOfOrder(WireError):
    """The sequence number is not higher than that of the frame before it."""

    reason = "out_of_order"


class CacheDamaged(CanarydError):
    """A request read a block of KV that a finding names. An adapter that evicts fails the request with it."""

    reason = "cache_damaged"


class RefusalReason(StrEnum):
    """Why an attachment was refused; label of `canaryd_attach_failures_total`."""

    NO_SIDE_CONNECTION = "no_side_connection"
    PEER_CREDENTIALS = "peer_credentials"
    IDENTITY_TAKEN = "identity_taken"
    GPU_NOT_VISIBLE = "gpu_not_visible"
    MEMORY_KIND = "memory_kind"
    HANDLE_INVALID = "handle_invalid"
    MEMORY_SIZE = "memory_size"
    OUT_OF_BOUNDS = "out_of_bounds"
    OVERLAP = "overlap"
    ALIGNMENT = "alignment"
    SCHEME = "scheme"
    TABLE_KIND = "table_kind"
    LIMIT = "limit"
    MALFORMED = "malformed"
    WORKER_UNAVAILABLE = "worker_unavailable"


class AttachRefused(CanarydError):
    """The pool cannot be attached.

    Args:
        refusal: stable reason code.
        cause: one sentence that says what is wrong.
        remedy: one sentence that says what to change.
    """

    reason = "attach_refused"

    def __init__(self, refusal: RefusalReason, cause: str, remedy: str) -> None:
        super().__init__(f"{cause} {remedy}")
        self.refusal = refusal
        self.cause = cause
        self.remedy = remedy


class BackendError(CanarydError):
    """A burst failed on the device; no result of it was used."""

    reason = "backend"


class WorkerError(CanarydError):
    """A worker process did not start, answer or stop as it must."""

    reason = "worker"

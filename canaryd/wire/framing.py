"""Frames: a 32-byte header and a msgpack body, two ZeroMQ parts.

Header, little-endian: magic `CNRY`, protocol version (u16), flags (u16, zero), session (16 random bytes), sequence
(u64). Stream messages count 1, 2, 3… within their session; `Attach` has number 0; `Beat` repeats the last number.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

import msgspec

from canaryd.errors import MalformedFrame, OversizedFrame, UnknownVersion
from canaryd.wire import limits
from canaryd.wire.messages import Attach, Begin, End, Snapshot, ToDaemon, ToEngine
from canaryd.wire.validate import validate

MAGIC = b"CNRY"
PROTOCOL_VERSION = 1

_HEADER = struct.Struct("<4sHH16sQ")
_ENCODER = msgspec.msgpack.Encoder()
# typing: a union is a valid decoder type at run time, but not a `type[T]` for mypy.
_TO_DAEMON = cast("msgspec.msgpack.Decoder[ToDaemon]", msgspec.msgpack.Decoder(ToDaemon))
_TO_ENGINE = cast("msgspec.msgpack.Decoder[ToEngine]", msgspec.msgpack.Decoder(ToEngine))

Message = TypeVar("Message")


class Header(NamedTuple):
    """The header of one frame: `session` is 16 bytes, `seq` the sequence number."""

    session: bytes
    seq: int


def encode(session: bytes, seq: int, message: ToDaemon | ToEngine) -> list[bytes]:
    """One frame as its two parts.

    Raises OversizedFrame when the body is larger than the limit, MalformedFrame when the message cannot be encoded or
    session or number cannot be put in a header.
    """
    if len(session) != limits.SESSION_BYTES or not 0 <= seq <= limits.MAX_SEQUENCE:
        raise MalformedFrame("a frame needs a session of 16 bytes and a number of at most 63 bits")
    try:
        body = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise MalformedFrame(f"the message cannot be encoded: {error}") from error
    _check_body_size(len(body))
    return [_HEADER.pack(MAGIC, PROTOCOL_VERSION, 0, session, seq), body]


def parse_header(data: bytes) -> Header:
    """The header in `data`. Raises MalformedFrame or UnknownVersion."""
    if len(data) != limits.HEADER_BYTES:
        raise MalformedFrame(f"a header has {limits.HEADER_BYTES} bytes, got {len(data)}")
    magic, version, flags, session, seq = _HEADER.unpack(data)
    if magic != MAGIC:
        raise MalformedFrame("the header does not start with CNRY")
    if version != PROTOCOL_VERSION:
        raise UnknownVersion(f"protocol version {version} is not spoken here; this is version {PROTOCOL_VERSION}")
    if flags != 0:
        raise MalformedFrame(f"header flags must be zero in version {PROTOCOL_VERSION}, got {flags}")
    if seq > limits.MAX_SEQUENCE:
        raise MalformedFrame("the sequence number has more than 63 bits")
    return Header(session, seq)


def decode_to_daemon(parts: Sequence[bytes]) -> tuple[Header, ToDaemon]:
    """A frame from an engine (header, body), decoded and validated.

    Raises MalformedFrame, OversizedFrame or UnknownVersion, and nothing else.
    """
    header, message = _decode(parts, _TO_DAEMON)
    if isinstance(message, Attach) and header.seq != 0:
        raise MalformedFrame(f"attach has number 0, got {header.seq}")
    if isinstance(message, Begin | End | Snapshot) and header.seq == 0:
        raise MalformedFrame("messages of the stream are numbered from 1 on")
    return header, message


def decode_to_engine(parts: Sequence[bytes]) -> tuple[Header, ToEngine]:
    """An answer of the daemon (header, body). Raises as `decode_to_daemon`."""
    return _decode(parts, _TO_ENGINE)


def _decode(parts: Sequence[bytes], decoder: msgspec.msgpack.Decoder[Message]) -> tuple[Header, Message]:
    if len(parts) != 2:
        raise MalformedFrame(f"a frame has two parts, got {len(parts)}")
    header = parse_header(parts[0])
    _check_body_size(len(parts[1]))
    try:
        message = decoder.decode(parts[1])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedFrame(f"the body does not decode: {error}") from error
    validate(message)
    return header, message


def _check_body_size(size: int) -> None:
    if size > limits.MAX_BODY_BYTES:
        raise OversizedFrame(f"a body has at most {limits.MAX_BODY_BYTES} bytes, got {size}")

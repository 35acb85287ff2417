"""Frames: round trips, every way to be malformed, and a fuzz that may raise nothing but the three errors."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_examples import (
    ATTACH,
    BEGIN,
    END,
    FINDING,
    GROUP,
    REGION,
    ROW,
    SESSION,
    SNAPSHOT,
    TO_DAEMON,
    TO_ENGINE,
    WRITES,
    column,
)

from canaryd.errors import MalformedFrame, OversizedFrame, UnknownVersion, WireError
from canaryd.wire import limits
from canaryd.wire.framing import decode_to_daemon, decode_to_engine, encode, parse_header
from canaryd.wire.messages import Attached, Copies, End, PageSet, Remap, Snapshot, ToDaemon, ToEngine, WhoAreYou
from canaryd.wire.validate import validate

change = msgspec.structs.replace


@pytest.mark.parametrize(("number", "message"), TO_DAEMON, ids=lambda value: type(value).__name__)
def test_round_trip_to_daemon(number: int, message: ToDaemon) -> None:
    parts = encode(SESSION, number, message)
    assert len(parts[0]) == limits.HEADER_BYTES
    header, decoded = decode_to_daemon(parts)
    assert (header.session, header.seq, decoded) == (SESSION, number, message)


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda value: type(value).__name__)
def test_round_trip_to_engine(message: ToEngine) -> None:
    header, decoded = decode_to_engine(encode(SESSION, 0, message))
    assert (header.session, decoded) == (SESSION, message)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"id": ""}, MalformedFrame),
        ({"group": "n" * (limits.MAX_NAME_CHARS + 1)}, OversizedFrame),
        ({"row": "n" * (limits.MAX_NAME_CHARS + 1)}, OversizedFrame),
        ({"slots": [(2, 1)]}, MalformedFrame),
        ({"slots": [(0, 0)] * (limits.MAX_FINDING_RANGES + 1)}, OversizedFrame),
        ({"slot_count": -1}, MalformedFrame),
    ],
)
def test_findings_are_bounded(changes: dict[str, Any], error: type[WireError]) -> None:
    with pytest.raises(error):
        decode_to_engine(encode(SESSION, 0, change(FINDING, **changes)))


def test_header_bytes_are_pinned() -> None:
    header, body = encode(SESSION, 0x0102030405060708, WhoAreYou())
    assert header == b"CNRY" + b"\x01\x00" + b"\x00\x00" + SESSION + b"\x08\x07\x06\x05\x04\x03\x02\x01"
    assert body == b"\x81\xa4kind\xabwho_are_you"


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (b"", MalformedFrame),
        (b"CNRY" + bytes(27), MalformedFrame),
        (b"CNRY" + bytes(29), MalformedFrame),
        (struct.pack("<4sHH16sQ", b"CNRX", 1, 0, SESSION, 1), MalformedFrame),
        (struct.pack("<4sHH16sQ", b"CNRY", 2, 0, SESSION, 1), UnknownVersion),
        (struct.pack("<4sHH16sQ", b"CNRY", 0, 0, SESSION, 1), UnknownVersion),
        (struct.pack("<4sHH16sQ", b"CNRY", 1, 1, SESSION, 1), MalformedFrame),
        (struct.pack("<4sHH16sQ", b"CNRY", 1, 0, SESSION, 1 << 63), MalformedFrame),
    ],
)
def test_bad_headers(header: bytes, error: type[WireError]) -> None:
    with pytest.raises(error):
        parse_header(header)
    with pytest.raises(error):
        decode_to_daemon([header, msgspec.msgpack.encode(BEGIN)])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_frame_has_two_parts(count: int) -> None:
    with pytest.raises(MalformedFrame):
        decode_to_daemon((encode(SESSION, 1, BEGIN) * 2)[:count])


def test_numbers_fit_the_kind_of_message() -> None:
    with pytest.raises(MalformedFrame):
        decode_to_daemon(encode(SESSION, 1, ATTACH))
    for message in (BEGIN, END, SNAPSHOT):
        with pytest.raises(MalformedFrame):
            decode_to_daemon(encode(SESSION, 0, message))


def test_body_size_is_bounded_on_both_sides() -> None:
    fits = End(op=1, freed=[PageSet(group=0, pages=bytes(limits.MAX_BODY_BYTES - 4096))])
    decode_to_daemon(encode(SESSION, 1, fits))
    large = End(op=1, freed=[PageSet(group=0, pages=bytes(limits.MAX_BODY_BYTES))])
    with pytest.raises(OversizedFrame):
        encode(SESSION, 1, large)
    with pytest.raises(OversizedFrame):
        decode_to_daemon([encode(SESSION, 1, BEGIN)[0], msgspec.msgpack.encode(large)])


@pytest.mark.parametrize(
    ("session", "number", "message"),
    [
        (b"short", 1, BEGIN),
        (SESSION, -1, BEGIN),
        (SESSION, 1 << 63, BEGIN),
        (SESSION, 1, change(BEGIN, op=1 << 70)),
        (SESSION, 1, change(BEGIN, lane=object())),
    ],
)
def test_what_cannot_be_encoded(session: bytes, number: int, message: ToDaemon) -> None:
    with pytest.raises(MalformedFrame):
        encode(session, number, message)


def body(message: Any, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.to_builtins(message, builtin_types=(bytes,)) | fields)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x80",
        b"\x81\xa4kind\xa7unknown",
        b"\x81\xa4kind\x01",
        b"\x82\xa4kind\xa3end\xa6closed\xdd\xff\xff\xff\xff",
        b"\x82\xa1x" + b"\x91" * 100_000 + b"\xa4kind\xa3end",
        b"\x83\xa4kind\xa3end\xa2op\x01\xa6closed\x91\xa2\xff\xff",
        body(END, extra=1),
        body(END, status="fine"),
        body(END, op="1"),
        body(END, op=1.5),
        body(END, closed=[1]),
        body(END, voids=None),
        msgspec.msgpack.encode(END) + b"\x00",
        msgspec.msgpack.encode(END)[:-1],
        msgspec.msgpack.encode(TO_ENGINE[0]),
    ],
)
def test_bodies_that_do_not_decode(data: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_to_daemon([encode(SESSION, 1, BEGIN)[0], data])


NAME = "n" * (limits.MAX_NAME_CHARS + 1)
MEMORY = ATTACH.memories[0]
HOST = ATTACH.memories[1]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (change(BEGIN, op=-1), MalformedFrame),
        (change(BEGIN, lane=""), MalformedFrame),
        (change(BEGIN, lane=NAME), OversizedFrame),
        (change(BEGIN, scope=[PageSet(group=0, pages=b"1234567")]), MalformedFrame),
        (change(BEGIN, scope=[PageSet(group=-1, pages=b"")]), MalformedFrame),
        (change(BEGIN, scope=[PageSet(group=limits.MAX_GROUPS, pages=b"")]), MalformedFrame),
        (change(BEGIN, scope=[PageSet(group=0, pages=bytes(8 * limits.MAX_SCOPE_PAGES + 8))]), OversizedFrame),
        (change(END, op=-1), MalformedFrame),
        (change(END, closed=[""]), MalformedFrame),
        (change(END, closed=[NAME]), OversizedFrame),
        (change(END, closed=["r"] * (limits.MAX_ROWS + 1)), OversizedFrame),
        (change(END, opened=[change(ROW, row="")]), MalformedFrame),
        (change(END, opened=[change(ROW, pages=b"1")]), MalformedFrame),
        (change(END, opened=[change(ROW, ids=b"1")]), MalformedFrame),
        (change(END, opened=[change(ROW, length=-1)]), MalformedFrame),
        (change(END, opened=[change(ROW, namespace=1 << 63)]), MalformedFrame),
        (change(END, opened=[ROW] * (limits.MAX_ROWS + 1)), OversizedFrame),
        (change(END, remaps=[Remap(row="r", group=0, start=-1, pages=b"")]), MalformedFrame),
        (change(END, remaps=[Remap(row="r", group=0, start=0, pages=b"123")]), MalformedFrame),
        (change(END, voids=[PageSet(group=0, pages=b"123")]), MalformedFrame),
        (change(END, freed=[PageSet(group=64, pages=b"")]), MalformedFrame),
        (change(END, freed=[PageSet(group=0, pages=b"")] * (limits.MAX_RECORDS + 1)), OversizedFrame),
        (change(END, writes=[change(WRITES, rows=["r"])]), MalformedFrame),
        (change(END, writes=[change(WRITES, counts=column(2, 2))]), MalformedFrame),
        (change(END, writes=[change(WRITES, counts=column(4, -1))]), MalformedFrame),
        (change(END, writes=[change(WRITES, tokens=column(1, 2))]), MalformedFrame),
        (change(END, writes=[change(WRITES, positions=column(1, 2))]), MalformedFrame),
        (change(END, writes=[change(WRITES, slots=column(1, 2)[:-1])]), MalformedFrame),
        (change(END, copies=[Copies(group=0, sources=column(1), destinations=b"")]), MalformedFrame),
        (change(SNAPSHOT, open_ops=[BEGIN, BEGIN]), MalformedFrame),
        (change(SNAPSHOT, open_ops=[BEGIN] * (limits.MAX_OPEN_OPS + 1)), OversizedFrame),
        (change(SNAPSHOT, rows=[change(ROW, row=NAME)]), OversizedFrame),
        (change(SNAPSHOT, cached=[PageSet(group=0, pages=b"1")]), MalformedFrame),
        (change(ATTACH, identity=change(ATTACH.identity, engine="")), MalformedFrame),
        (change(ATTACH, identity=change(ATTACH.identity, tp=-1)), MalformedFrame),
        (change(ATTACH, engine_kind=NAME), OversizedFrame),
        (change(ATTACH, memories=[]), MalformedFrame),
        (change(ATTACH, memories=[change(MEMORY, handle=bytes(63))]), MalformedFrame),
        (change(ATTACH, memories=[change(MEMORY, size=0)]), MalformedFrame),
        (change(ATTACH, memories=[change(MEMORY, offset=-1)]), MalformedFrame),
        (change(ATTACH, memories=[change(MEMORY, gpu_uuid="")]), MalformedFrame),
        (change(ATTACH, memories=[change(HOST, fd_index=0)]), MalformedFrame),
        (change(ATTACH, memories=[HOST] * (limits.MAX_MEMORIES + 1)), OversizedFrame),
        (change(ATTACH, groups=[]), MalformedFrame),
        (change(ATTACH, groups=[GROUP, GROUP]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, regions=[])]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, num_pages=0)]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, num_pages=1 << 30, page_size=1 << 30)]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, ring=-1)]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, reserved=[(3, 3)])]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, regions=[REGION] * 5000)]), OversizedFrame),
        (change(ATTACH, groups=[change(GROUP, regions=[change(REGION, offset=-4)])]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, regions=[change(REGION, pieces=0)])]), MalformedFrame),
        (change(ATTACH, groups=[change(GROUP, regions=[change(REGION, piece_bytes=1 << 60)])]), MalformedFrame),
        (Attached(described_ratio=float("nan"), scheme="native"), MalformedFrame),
        (Attached(described_ratio=1.5, scheme="native"), MalformedFrame),
        (object(), MalformedFrame),
    ],
)
def test_structural_validation(message: Any, error: type[WireError]) -> None:
    with pytest.raises(error):
        validate(message)


def test_errors_do_not_show_token_ids() -> None:
    with pytest.raises(MalformedFrame) as raised:
        validate(change(END, writes=[change(WRITES, tokens=column(123456, 2))]))
    assert "123456" not in str(raised.value)


PARTS = [encode(SESSION, number, message) for number, message in TO_DAEMON]


def decode_or_refuse(parts: list[bytes]) -> None:
    for decode in (decode_to_daemon, decode_to_engine):
        with contextlib.suppress(MalformedFrame, OversizedFrame, UnknownVersion):
            decode(parts)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=64), st.binary(max_size=400))
def test_fuzz_of_random_bytes(header: bytes, data: bytes) -> None:
    decode_or_refuse([header, data])
    decode_or_refuse([PARTS[1][0], data])


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(PARTS), st.data())
def test_fuzz_of_damaged_frames(parts: list[bytes], data: st.DataObject) -> None:
    header, damaged = bytearray(parts[0]), bytearray(parts[1])
    for _ in range(data.draw(st.integers(1, 4))):
        target = data.draw(st.sampled_from([header, damaged, damaged, damaged]))
        if target:
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    decode_or_refuse([bytes(header), bytes(damaged)])
    decode_or_refuse([bytes(parts[0]), bytes(damaged[:cut])])


def test_a_snapshot_of_many_rows_is_quick_to_check() -> None:
    rows = [change(ROW, row=f"row-{number}") for number in range(10_000)]
    _, message = decode_to_daemon(encode(SESSION, 1, Snapshot(open_ops=[], rows=rows, cached=[])))
    assert isinstance(message, Snapshot)
    assert len(message.rows) == 10_000

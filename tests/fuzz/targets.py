"""What each target does with one input, and what must hold whatever the input is. A target raises only on a defect."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from canaryd.config import ConfigError, dump, load
from canaryd.errors import AttachRefused, MalformedFrame, WireError
from canaryd.findings import FindingsFile
from canaryd.pool.regions import build_layouts, described_ratio
from canaryd.watch.policy import Policy
from canaryd.wire.framing import decode_to_daemon, decode_to_engine, encode
from canaryd.wire.messages import Attach, Begin, End, Snapshot, ToDaemon
from tests.fuzz.choices import Choices
from tests.watch.harness import Bench, group_spec

SESSION = bytes(range(16))
_MEMORY_BYTES = 4096
_BENCH_ROWS = 4
_MOST_BYTES_PROVEN = 1 << 14


def frames(data: bytes) -> None:
    """A frame decodes to a message that encodes to the same message again, or raises a wire error."""
    kind, rest = data[:1], data[1:]
    if kind < b"\x40":
        parts = [rest[:32], rest[32:]]
    elif kind < b"\x80":
        parts = [encode(SESSION, 1, Begin(op=1))[0], rest]
    else:
        choices = Choices(rest)
        message = choices.message()
        try:
            parts = encode(SESSION, 0 if isinstance(message, Attach) else 1 + choices.byte(), message)
        except MalformedFrame:
            return
    for decode in (decode_to_daemon, decode_to_engine):
        with contextlib.suppress(WireError):
            header, decoded = decode(parts)
            again = decode(encode(header.session, header.seq, decoded))
            assert again == (header, decoded), "a frame that was accepted changes when it is sent again"


def stream(data: bytes) -> None:
    """Whatever a peer says in good frames: the core raises nothing, remembers no more than its bounds, and goes on."""
    choices = Choices(data)
    bench = Bench(
        [
            group_spec(num_pages=12, page_size=4, reserved=[(0, 4)]),
            group_spec("ring", num_pages=6, holes_ok=True, ring=8),
        ],
        policy=Policy(max_rows=_BENCH_ROWS, max_open_ops=3, max_suspects=8, max_findings_per_burst=4),
    )
    while not choices.used_up:
        action = choices.byte()
        if action < 64:
            bench.now += 0.05 * (action % 4)
            bench.burst(announced=bench.seq + action % 3)
        elif action < 72:
            bench.flip(action % 4, bit=action % 8)
        elif action < 76:
            bench.seq += 1  # a message was lost
        else:
            message = _accepted(choices.pick((choices.end, choices.end, choices.begin, choices.snapshot))())
            if isinstance(message, Begin | End | Snapshot):
                bench.send(message)
        report = bench.watch.report(bench.now)
        assert all(value >= 0 for value in report.slots.values()), "a negative number of slots"
    bench.send(Snapshot(open_ops=[], rows=[], cached=[]))
    bench.tick(3)
    assert bench.watch.take_resync() is None, "the core stays in a gap after a good snapshot"


def _accepted(message: ToDaemon) -> ToDaemon | None:
    try:
        return decode_to_daemon(encode(SESSION, 1, message))[1]
    except WireError:
        return None


def attach(data: bytes) -> None:
    """A layout that is accepted has each of its bytes inside its memory, and none twice."""
    message = _accepted_attach(Choices(data).attach())
    if message is None:
        return
    assert 0.0 <= described_ratio(message) <= 1.0
    memories = [torch.zeros(_MEMORY_BYTES, dtype=torch.uint8) for _ in message.memories]
    try:
        layouts = build_layouts(message, memories)
    except AttachRefused:
        return
    for group, layout in zip(message.groups, layouts, strict=True):
        numbers = {id(memory): number for number, memory in enumerate(memories)}
        seen = [np.zeros(_MEMORY_BYTES, dtype=np.int64) for _ in memories]
        if layout.num_slots * layout.slot_bytes > _MOST_BYTES_PROVEN:
            raise AssertionError(f"{layout.num_slots} slots were accepted in {_MEMORY_BYTES} bytes")
        for spec, region in zip(group.regions, layout.regions, strict=True):
            for page in range(group.num_pages):
                for offset in range(group.page_size):
                    for piece in range(spec.pieces):
                        at = (
                            spec.offset
                            + page * spec.page_stride
                            + offset * spec.slot_stride
                            + piece * spec.piece_stride
                        )
                        assert 0 <= at <= at + spec.piece_bytes <= _MEMORY_BYTES, "a byte outside of its memory"
                        seen[numbers[id(region.memory)]][at : at + spec.piece_bytes] += 1
        assert all((counts <= 1).all() for counts in seen), "a byte that belongs to two places of one group"


def _accepted_attach(message: Attach) -> Attach | None:
    try:
        decoded = decode_to_daemon(encode(SESSION, 0, message))[1]
    except WireError:
        return None
    assert isinstance(decoded, Attach)
    return decoded


def config(data: bytes) -> None:
    """A configuration loads, and then survives being written and read, or raises one ConfigError."""
    text, _, variable = data.partition(b"\x00")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "canaryd.yaml")
        path.write_bytes(text)
        environment = {"CANARYD_WATCH__TICK": variable.decode("utf-8", "replace")} if variable else {}
        try:
            loaded = load(path, environment)
        except ConfigError:
            return
        path.write_text(dump(loaded))
        assert load(path, {}) == loaded, "a configuration changes when it is written and read"


def findings(data: bytes) -> None:
    """A damaged findings file never keeps the daemon from starting, and bounds hold."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "findings.jsonl").write_bytes(data)
        file = FindingsFile(Path(folder), file_bytes=65536, files=2, max_open=3)
        assert len(file.open) <= 3
        assert sum(file.open_counts().values()) >= len(file.open)
        file.close()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": frames,
    "stream": stream,
    "attach": attach,
    "config": config,
    "findings": findings,
}

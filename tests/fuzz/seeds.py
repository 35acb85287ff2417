"""Where the fuzzer begins: one good input of each kind."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from canaryd.config import Config, dump
from canaryd.wire.framing import encode

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "wire"))
from wire_examples import SESSION, TO_DAEMON, TO_ENGINE  # noqa: E402


def inputs(target: str) -> list[bytes]:
    """Seeds of the target, besides what it crashed on once."""
    found = [path.read_bytes() for path in sorted((Path(__file__).parent / "crashes" / target).glob("*"))]
    if target == "frames":
        found += [b"\x00" + b"".join(encode(SESSION, number, message)) for number, message in TO_DAEMON]
        found += [b"\x40" + msgspec.msgpack.encode(message) for message in TO_ENGINE]
        found += [b"\x80" + bytes([kind, *range(1, 60)]) for kind in range(6)]
    elif target in {"stream", "attach"}:
        found += [bytes(range(start, start + 90)) for start in range(0, 160, 20)]
    elif target == "config":
        found += [
            dump(Config()).encode(),
            b"http: {port: 9000}\x000.5",
            (ROOT / "configs" / "canaryd.yaml").read_bytes(),
        ]
    elif target == "findings":
        found += [b'{"event":"opened","id":"a-1"}\n{"event":"closed","id":"a-1"}\n', b"\xff\n{}"]
    return found


@contextmanager
def seeds(target: str) -> Iterator[Path]:
    """A folder with the seeds, into which the fuzzer may write what it learns."""
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(inputs(target)):
            Path(folder, f"seed-{number:03}").write_bytes(data)
        yield Path(folder)

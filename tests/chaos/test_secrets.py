"""Everything that a run wrote or showed is searched: token ids, KV bytes, handles and sessions must be nowhere."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon.engine import Engine
from daemon.harness import Daemon, Folder, wait_for

TOKEN = 1_987_654_321
CONTENT = b"\xc3\x5a\x99KV-CONTENT"
PAGES = ("/metrics", "/status", "/findings", "/slot?engine=leaky&group=full&slot=1")

pytestmark = pytest.mark.slow


class Telling:
    """Instead of random numbers: ids and bytes that can be recognised."""

    def randrange(self, _stop: int) -> int:
        return TOKEN

    def randbytes(self, count: int) -> bytes:
        return (CONTENT * count)[:count]


@pytest.fixture
def folder() -> Iterator[Folder]:
    made = Folder()
    yield made
    made.remove()


def traces(session: bytes) -> dict[str, bytes]:
    """What must not be found, in every form in which it might be written."""
    forms: dict[str, bytes] = {}
    for name, secret in {"content": CONTENT, "session": session}.items():
        forms |= {
            name: secret,
            f"{name} in hex": secret.hex().encode(),
            f"{name} in base64": base64.b64encode(secret)[:12],
            f"{name} as Python prints it": repr(secret)[2:-1].encode(),
        }
    for shown in (str(TOKEN), f"{TOKEN:x}", f"{TOKEN:X}"):
        forms[f"token as {shown}"] = shown.encode()
    forms["token in hex bytes"] = TOKEN.to_bytes(8, "little").hex().encode()
    return forms


def test_nothing_that_was_written_tells_secrets(folder: Folder) -> None:
    daemon = Daemon(folder, WORKERS__HOST="on", LOGS__LEVEL="debug")
    engine = Engine(str(folder.sockets), "leaky", 32)
    telling: Any = Telling()
    engine.random = telling
    try:
        wait_for("the attachment", lambda: engine.client.stats.state == "attached")
        slots = engine.write("row", 10)
        wait_for("settled slots", lambda: daemon.settled("leaky") >= len(slots))
        engine.flip(slots[2], 0, 3, 1)
        overwritten = engine.pool.address(1, slots[6])
        engine.pool.bytes[overwritten : overwritten + 32] = CONTENT[::-1].ljust(32, b"\x00")
        wait_for("two findings", lambda: (daemon.metric("canaryd_findings_open", engine="leaky") or 0) >= 2)
        shown = b"".join(daemon.get(page)[1].encode() for page in PAGES)
        link: Any = engine.client._sender._link
        session: bytes = link.session
    finally:
        engine.client.close()
        daemon.stop()
    written = {
        str(Path(base, name).relative_to(folder.root)): Path(base, name).read_bytes()
        for base, _folders, names in os.walk(folder.root)
        for name in names
        if Path(base, name).is_file()
    }
    assert {"daemon.log", "st/findings.jsonl"} <= set(written)
    assert b"leaky" in written["daemon.log"]
    assert b"leaky" in written["st/findings.jsonl"]
    found = [
        f"{what} in {where}"
        for where, text in {**written, "a page": shown}.items()
        for what, trace in traces(session).items()
        if trace in text
    ]
    assert not found

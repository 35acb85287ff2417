"""Two real processes over shared memory: the parent maps the child's pool, sees its bytes and its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_daemon import FakeDaemon

from canaryd.pool.mapping import map_memories
from canaryd.pool.regions import build_layouts, described_ratio
from canaryd.wire.messages import Attach, End

SCRIPT = Path(__file__).with_name("engine_process.py")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path)
    yield daemon
    daemon.close()


def start(directory: Path, behaviour: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(SCRIPT), str(directory), behaviour])


def test_bytes_and_death_are_seen(daemon: FakeDaemon, tmp_path: Path) -> None:
    engine = start(tmp_path, "stay")
    try:
        daemon.until(lambda: len(daemon.messages(End)) == 3, "three steps")
        assert daemon.connections[0].peer.pid == engine.pid
        attach = daemon.messages(Attach)[0]
        assert isinstance(attach, Attach)
        pool = map_memories(attach.memories, daemon.fds, device_uuid=None)
        layout = build_layouts(attach, pool.tensors)[0]
        assert described_ratio(attach) == 1.0
        slots = pool.tensors[0].view(layout.num_slots, layout.slot_bytes)
        expected = torch.zeros_like(slots)
        for message in daemon.messages(End):
            assert isinstance(message, End)
            slot = int.from_bytes(message.writes[0].slots, "little")
            expected[slot] = slot + 1
        assert torch.equal(slots, expected)
        assert int(expected.sum()) == 96 * 6

        assert daemon.gone == 0
        engine.send_signal(signal.SIGSTOP)
        daemon.pump()
        assert daemon.gone == 0, "a stopped engine is not a dead one"
        engine.kill()
        engine.wait()
        daemon.pump()
        assert daemon.gone == 1, "death is seen at once"
        # what is mapped stays readable until we let go of it
        assert torch.equal(slots, expected)
        assert daemon.page is not None
        assert daemon.page.read() == 7
    finally:
        engine.kill()
        engine.wait()


def test_interpreter_exit_sends_what_is_queued(daemon: FakeDaemon, tmp_path: Path) -> None:
    engine = start(tmp_path, "leave")
    daemon.until(lambda: daemon.gone == 1, "the end of the engine")
    daemon.pump()
    assert engine.wait() == 0
    assert len(daemon.messages(End)) == 3


def test_client_needs_neither_numpy_nor_torch(tmp_path: Path) -> None:
    script = (
        "import sys, canaryd.client, canaryd.wire.side\n"
        "assert not {'torch', 'numpy', 'triton', 'pydantic'} & set(sys.modules), 'a heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), check=False)
    assert done.returncode == 0

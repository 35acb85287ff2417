"""Two real processes over shared memory: the parent maps the child's pool, sees its bytes and its death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from fake_daemon import FakeDaemon

from canaryd.errors import AttachRefused, RefusalReason
from canaryd.pool.handles import open_handles
from canaryd.pool.mapping import map_memories
from canaryd.pool.regions import build_layouts, described_ratio
from canaryd.wire.messages import Attach, CudaIpcMemory, End

SCRIPT = Path(__file__).with_name("engine_process.py")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path)
    yield daemon
    daemon.close()


def start(directory: Path, behaviour: str, device: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(SCRIPT), str(directory), behaviour, device]
    return subprocess.Popen(command, env=dict(os.environ) | environment, stderr=subprocess.PIPE)


def uuid_of(attach: Attach) -> str | None:
    memory = attach.memories[0]
    return memory.gpu_uuid if isinstance(memory, CudaIpcMemory) else None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bytes_and_death_are_seen(device: str, daemon: FakeDaemon, tmp_path: Path) -> None:
    engine = start(tmp_path, "stay", device)
    try:
        daemon.until(lambda: len(daemon.messages(End)) == 3, "three steps")
        assert daemon.connections[0].peer.pid == engine.pid
        attach = daemon.messages(Attach)[0]
        assert isinstance(attach, Attach)
        pool = map_memories(attach.memories, daemon.fds, device_uuid=uuid_of(attach))
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
        del slots, layout
        pool.close()
    finally:
        engine.kill()
        engine.communicate()


def test_interpreter_exit_sends_what_is_queued(daemon: FakeDaemon, tmp_path: Path) -> None:
    engine = start(tmp_path, "leave", "cpu")
    daemon.until(lambda: daemon.gone == 1, "the end of the engine")
    daemon.pump()
    assert engine.communicate() == (None, b"")
    assert engine.returncode == 0
    assert len(daemon.messages(End)) == 3


@pytest.mark.gpu
def test_cuda_memory_is_refused_where_its_size_or_handle_is_wrong(daemon: FakeDaemon, tmp_path: Path) -> None:
    engine = start(tmp_path, "stay", "cuda")
    try:
        daemon.until(lambda: bool(daemon.messages(Attach)), "the attach message")
        attach = daemon.messages(Attach)[0]
        assert isinstance(attach, Attach)
        memory = attach.memories[0]
        assert isinstance(memory, CudaIpcMemory)
        assert memory.offset > 0
        for changes, refusal in (
            ({"size": 1 << 40}, RefusalReason.MEMORY_SIZE),
            ({"handle": bytes(64)}, RefusalReason.HANDLE_INVALID),
            ({"gpu_uuid": "GPU-00000000-0000-0000-0000-000000000000"}, RefusalReason.GPU_NOT_VISIBLE),
        ):
            with pytest.raises(AttachRefused) as refused:
                map_memories([msgspec.structs.replace(memory, **changes)], [], device_uuid=memory.gpu_uuid)
            assert refused.value.refusal is refusal
        assert len(open_handles()) == 0
        pool = map_memories([memory, memory], [], device_uuid=memory.gpu_uuid)
        assert len(open_handles()) == 1
        assert pool.tensors[0].data_ptr() == pool.tensors[1].data_ptr()
        pool.close()
        assert len(open_handles()) == 0
    finally:
        engine.kill()
        engine.communicate()


@pytest.mark.gpu
def test_expandable_segments_are_refused_by_name(tmp_path: Path) -> None:
    engine = start(tmp_path, "stay", "cuda", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    _, errors = engine.communicate(timeout=120)
    assert engine.returncode == 1
    assert b"AttachRefused" in errors
    assert b"expandable_segments" in errors


def test_client_needs_neither_numpy_nor_torch(tmp_path: Path) -> None:
    script = (
        "import sys, canaryd.client, canaryd.wire.side\n"
        "assert not {'torch', 'numpy', 'triton', 'pydantic'} & set(sys.modules), 'a heavy import'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), check=False)
    assert done.returncode == 0

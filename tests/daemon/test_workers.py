"""Worker processes without a device: started, found silent, replaced after a pause, and found on a machine's GPUs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from canaryd.control import messages as control
from canaryd.control.channel import Channel
from canaryd.control.messages import HOST, FromWorker, Pong, Ready, Slow, WorkerSettings
from canaryd.supervisor import workers as module
from canaryd.supervisor.gpus import gpus_of_proc
from canaryd.supervisor.workers import Patience, WorkerProcess, WorkerState

PATIENCE = Patience(hang=10.0, startup=100.0, backoff=1.0, backoff_max=5.0, queue_bytes=1 << 20)


class Sleeper:
    """Stands for a process."""

    pid = 1

    def __init__(self) -> None:
        self.returncode: int | None = None
        self.waits = 0
        self.immortal = False

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if not self.immortal:
            self.returncode = -signal.SIGKILL

    def wait(self, timeout: float) -> int:
        self.waits += 1
        if self.returncode is None:
            raise module.subprocess.TimeoutExpired("sleeper", timeout)
        return self.returncode


class Bench:
    """A worker whose process is a `Sleeper`, whose end of the channel is ours, and whose clock we set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[Sleeper] = []
        self.ends: list[Channel] = []
        monkeypatch.setattr(module.subprocess, "Popen", self._start)
        real = module.socket.socketpair

        def pair(*arguments: object) -> tuple[module.socket.socket, module.socket.socket]:
            mine, theirs = real(*arguments)  # type: ignore[arg-type]
            self.ends.append(Channel(theirs.dup(), limit_bytes=1 << 20))
            return mine, theirs

        monkeypatch.setattr(module.socket, "socketpair", pair)
        self.worker = WorkerProcess(
            WorkerSettings(
                device=HOST,
                backend=None,
                scheme="native",
                nice=0,
                tick=0.1,
                busy_share=0.1,
                max_age_live=1.0,
                max_age_idle=1.0,
                bytes_per_burst=1 << 20,
                selftest_interval=60.0,
                log_format="text",
                log_level="info",
            ),
            PATIENCE,
            0.0,
        )

    def _start(self, *_arguments: object, **_settings: object) -> Sleeper:
        self.started.append(Sleeper())
        return self.started[-1]

    def say(self, message: FromWorker, now: float) -> None:
        self.ends[-1].send(control.encode(message))
        self.worker.receive(now)

    def close(self) -> None:
        self.worker.finish()
        for end in self.ends:
            end.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.close()


def test_a_start_may_take_longer_than_an_answer(bench: Bench) -> None:
    worker = bench.worker
    assert worker.turn(0.0) is None
    assert worker.state is WorkerState.STARTING
    assert worker.turn(99.0) is None
    bench.say(Ready(backend="reference", description="test"), 99.5)
    assert worker.state is WorkerState.READY
    assert worker.turn(109.0) is None
    bench.say(Pong(number=1), 109.0)
    assert worker.turn(118.9) is None
    assert worker.turn(119.1) == "it was silent for 10 s"


def test_compiling_may_take_as_long_as_a_start(bench: Bench) -> None:
    worker = bench.worker
    worker.turn(0.0)
    bench.say(Ready(backend="triton", description="test"), 1.0)
    bench.say(Slow(), 2.0)
    assert worker.turn(90.0) is None
    bench.say(Pong(number=1), 91.0)
    assert worker.turn(101.5) == "it was silent for 10 s"


def test_pauses_grow_and_are_bounded(bench: Bench) -> None:
    worker = bench.worker
    now, pauses = 0.0, []
    for _ in range(5):
        worker.turn(now)
        assert worker.state is WorkerState.STARTING
        worker.discard("test", now)
        before = now
        while worker.state is WorkerState.WAITING:
            now += 0.25
            worker.turn(now)
        pauses.append(now - before)
    assert pauses == [1, 2, 4, 5, 5]
    assert worker.restarts == 5
    assert worker.tally.counters()["canaryd_worker_restarts_total", ()] == 5


def test_a_process_that_cannot_be_killed_does_not_hold_the_loop(bench: Bench) -> None:
    worker = bench.worker
    worker.turn(0.0)
    stuck = bench.started[0]
    stuck.immortal = True
    worker.discard("test", 1.0)
    worker.turn(2.0)
    assert len(bench.started) == 2
    assert stuck.waits == 1


def test_memory_that_is_not_closed_costs_the_worker_its_life(bench: Bench) -> None:
    worker = bench.worker
    worker.turn(0.0)
    bench.say(Ready(backend="reference", description="test"), 0.5)
    worker.expect_unmapped(b"s", 1.0)
    worker.unmapped(b"s")
    worker.expect_unmapped(b"t", 1.0)
    assert worker.turn(5.9) is None
    bench.say(Pong(number=1), 6.0)
    assert worker.turn(6.1) == "it did not close an ended engine's memory"


def test_nonsense_ends_the_channel(bench: Bench) -> None:
    bench.worker.turn(0.0)
    bench.ends[-1].send(b"\xc1")
    with pytest.raises(module.ChannelClosed, match="nonsense"):
        bench.worker.receive(1.0)


def test_a_worker_sees_its_own_gpu_and_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PATH": "/bin", "CANARYD_HTTP__PORT": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert module._environment(given, "GPU-1") == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert module._environment(given, HOST)["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_as_the_kernel_driver_lists_them(tmp_path: Path) -> None:
    for name, text in {
        "0000:01:00.0": "Model: \t X\nGPU UUID: \t GPU-0a1b2c3d-0000-1111-2222-333344445555\nVideo: 1\n",
        "0000:02:00.0": "GPU UUID: \t GPU-????????-????-????-????-????????????\n",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "information").write_text(text)
    assert gpus_of_proc(tmp_path) == ["GPU-0a1b2c3d-0000-1111-2222-333344445555"]
    assert gpus_of_proc(tmp_path / "nowhere") == []

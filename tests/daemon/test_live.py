"""A real daemon, real workers and real engine processes: what is found, and what happens when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from daemon.harness import Daemon, EngineProcess, Folder, maps_of, wait_for

TOKENS = 10

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Folder]:
    made = Folder()
    yield made
    made.remove()


@pytest.fixture
def daemon(folder: Folder) -> Iterator[Daemon]:
    """For tests that kill or stop a part of it."""
    made = Daemon(folder, WORKERS__HOST="on", WORKERS__HANG_TIMEOUT="2")
    yield made
    made.stop()


@pytest.fixture(scope="module")
def steady() -> Iterator[Daemon]:
    """One daemon for the tests that only hurt their own engine: a worker takes seconds to start."""
    folder = Folder()
    made = Daemon(folder, WORKERS__HOST="on")
    yield made
    made.stop()
    folder.remove()


@contextmanager
def attached(daemon: Daemon, name: str = "tiny", pages: int = 32) -> Iterator[EngineProcess]:
    """An engine that is attached, until the end of the block."""
    engine = EngineProcess(daemon.folder, name, pages)
    try:
        wait_for("the attachment", lambda: engine.ask("stats")["state"] == "attached")
        yield engine
    finally:
        engine.kill()


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[EngineProcess]:
    with attached(daemon) as made:
        yield made


def guarded(daemon: Daemon, engine: EngineProcess, slot: int) -> bool:
    """Whether a change of the slot's bytes would be found now."""
    code, text = daemon.get(f"/slot?engine={engine.name}&group=full&slot={slot}")
    return code == 200 and bool(json.loads(text)["guarded"])


def settle(daemon: Daemon, engine: EngineProcess, row: str = "r1") -> list[int]:
    """Slots of a new row that are guarded now."""
    slots = engine.write(row, TOKENS)
    wait_for("settled slots", lambda: all(guarded(daemon, engine, slot) for slot in slots))
    return slots


def damage(daemon: Daemon, engine: EngineProcess, slot: int, count: int = 1) -> None:
    engine.flip(slot)
    counted = {"engine": engine.name, "check": "content"}
    wait_for("the finding", lambda: daemon.metric("canaryd_mismatches_total", **counted) == count)


def memory_of(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def records(daemon: Daemon, engine: str) -> list[dict[str, Any]]:
    """The findings file's records about one engine."""
    lines = (daemon.folder.state / "findings.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    mine = {each["id"] for each in every if each["finding"] and each["finding"]["engine"] == engine}
    return [each for each in every if each["id"] in mine and each["record"] != "updated"]


def test_corruption_is_found_and_named(steady: Daemon) -> None:
    with attached(steady, "named") as engine:
        slots = settle(steady, engine)
        labels = {"engine": "named", "gpu_uuid": "host", "check": "content"}
        assert steady.metric("canaryd_findings_open", **labels) == 0
        engine.flip(slots[3], region=1, byte=20, bit=5)
        wait_for("the finding", lambda: steady.metric("canaryd_findings_open", **labels) == 1)
        assert steady.metric("canaryd_mismatches_total", **labels) == 1
        (finding,) = [each for each in json.loads(steady.get("/findings")[1]) if each["engine"] == "named"]
        detail = finding["detail"]
        assert (detail["group"], detail["slots"], detail["row"]) == ("full", [[slots[3]] * 2], "r1")
        assert (detail["region"], detail["byte_offset"], detail["classification"]) == ("layer1", 16, "bit_flip")
        assert int(detail["changed_bits"], 16) == 1 << (4 * 8 + 5)
        (record,) = records(steady, "named")
        assert record["id"] == finding["id"]
        told = wait_for("the engine to hear of it", lambda: engine.ask("findings"))
        assert told == [[finding["id"], "content", "full", [[slots[3]] * 2], 1, "r1"]]
        assert steady.status()["overall"] == "corrupt"


def test_a_healthy_engine_raises_nothing(steady: Daemon) -> None:
    with attached(steady, "healthy") as engine:
        for row in range(5):
            settle(steady, engine, f"r{row}")
        passes = "canaryd_pass_last_completion_timestamp_seconds"
        first = wait_for("a pass", lambda: steady.metric(passes, engine="healthy"))
        wait_for("another pass", lambda: (steady.metric(passes, engine="healthy") or 0) > first)
        assert steady.metric("canaryd_mismatches_total", engine="healthy") == 0
        assert steady.metric("canaryd_suspects_total", engine="healthy") == 0
        assert steady.metric("canaryd_engine_message_gaps_total", engine="healthy") == 0
        assert steady.metric("canaryd_kernel_launches_total", gpu_uuid="host", kernel="digest")
        assert steady.metric("canaryd_selftest_last_success_timestamp_seconds", gpu_uuid="host")
        assert steady.metric("canaryd_selftest_failures_total", gpu_uuid="host") == 0
        assert "triton" not in maps_of(steady.worker()["pid"])


def test_a_hundred_thousand_slots_stay_small(steady: Daemon) -> None:
    with attached(steady, "large", pages=26_000) as engine:
        for row in range(50):
            engine.write(f"r{row}", 2000)
        wait_for("settled slots", lambda: steady.settled("large") == 100_000)
        passes = "canaryd_pass_last_completion_timestamp_seconds"
        wait_for("a whole pass", lambda: steady.metric(passes, engine="large"))
        assert memory_of(steady.worker()["pid"]) < 400e6
        assert memory_of(steady.process.pid) < 80e6


def test_an_engine_that_dies_is_unmapped_and_remembered(steady: Daemon) -> None:
    labels = {"engine": "mortal", "check": "content"}
    with attached(steady, "mortal") as engine:
        damage(steady, engine, settle(steady, engine)[0])
        worker = steady.worker()["pid"]
        assert "pool-mortal" in maps_of(worker)
        engine.kill()
        wait_for("the mapping's end", lambda: "pool-mortal" not in maps_of(worker), patience=5)
    wait_for("the word", lambda: steady.engine_state("mortal") == "gone")
    assert steady.metric("canaryd_engine_state", engine="mortal", state="gone") == 1
    assert steady.metric("canaryd_slots", engine="mortal") is None
    # The page must not resolve before anyone saw it: findings end with the next process of that name.
    assert steady.metric("canaryd_findings_open", **labels) == 1
    with attached(steady, "mortal") as successor:
        assert steady.metric("canaryd_findings_open", **labels) == 0
        assert steady.metric("canaryd_mismatches_total", **labels) == 1
        assert steady.metric("canaryd_stamps_lost_total", engine="mortal") == 0
        damage(steady, successor, settle(steady, successor)[0], count=2)
    assert [each["record"] for each in records(steady, "mortal")] == ["opened", "closed", "opened"]


def test_a_stopped_engine_is_stalled_and_stays_mapped(steady: Daemon) -> None:
    with attached(steady, "sleepy") as engine:
        slots = settle(steady, engine)
        engine.process.send_signal(signal.SIGSTOP)
        wait_for("the stall", lambda: steady.engine_state("sleepy") == "stalled")
        assert steady.metric("canaryd_engine_state", engine="sleepy", state="stalled") == 1
        assert "pool-sleepy" in maps_of(steady.worker()["pid"])
        engine.process.send_signal(signal.SIGCONT)
        wait_for("its return", lambda: steady.engine_state("sleepy") == "attached")
        damage(steady, engine, slots[-1])


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_hangs_is_replaced(daemon: Daemon, engine: EngineProcess, blow: signal.Signals) -> None:
    damage(daemon, engine, settle(daemon, engine)[0])
    stamped = daemon.metric("canaryd_slots_stamped_total", engine="tiny")
    launches = daemon.metric("canaryd_kernel_launches_total", kernel="digest")
    assert stamped is not None
    assert launches is not None
    old = daemon.worker()["pid"]
    os.kill(old, blow)
    wait_for("the restart", lambda: daemon.metric("canaryd_worker_restarts_total", gpu_uuid="host") == 1)
    assert daemon.get("/healthz")[0] == 200
    wait_for("the new attachment", lambda: engine.ask("stats")["attaches"] == 2)
    wait_for("coverage", lambda: daemon.settled("tiny") >= TOKENS - 1)
    assert daemon.worker()["pid"] not in (old, None)
    assert (daemon.metric("canaryd_stamps_lost_total", engine="tiny") or 0) >= TOKENS - 1
    assert (daemon.metric("canaryd_slots_stamped_total", engine="tiny") or 0) >= stamped
    assert (daemon.metric("canaryd_kernel_launches_total", kernel="digest") or 0) >= launches
    # The same process still holds the damaged memory: its finding stands, and is not found twice.
    assert daemon.metric("canaryd_findings_open", engine="tiny", check="content") == 1
    damage(daemon, engine, settle(daemon, engine, "r2")[5], count=2)


def test_findings_outlive_a_killed_supervisor(daemon: Daemon, engine: EngineProcess, folder: Folder) -> None:
    damage(daemon, engine, settle(daemon, engine)[0])
    wait_for("its record", lambda: daemon.metric("canaryd_findings_open", engine="tiny", check="content") == 1)
    worker = daemon.worker()["pid"]
    daemon.process.kill()
    daemon.process.wait()
    wait_for("the orphan's end", lambda: not Path(f"/proc/{worker}/maps").exists())
    (folder.state / "http.port").unlink()
    successor = Daemon(folder, WORKERS__HOST="on")
    try:
        assert successor.metric("canaryd_findings_open", engine="tiny", gpu_uuid="host", check="content") == 1
        wait_for("the new attachment", lambda: engine.ask("stats")["attaches"] == 2)
        assert successor.metric("canaryd_findings_open", engine="tiny", check="content") == 1
        damage(successor, engine, settle(successor, engine, "r2")[1])
        identities = [each["id"] for each in json.loads(successor.get("/findings")[1])]
        assert len(set(identities)) == 2
    finally:
        successor.stop()


def test_sigterm_ends_everything_cleanly(daemon: Daemon, engine: EngineProcess, folder: Folder) -> None:
    settle(daemon, engine)
    worker = daemon.worker()["pid"]
    assert daemon.stop() == 0
    assert not Path(f"/proc/{worker}").exists()
    assert sorted(path.name for path in folder.sockets.iterdir()) == ["canaryd.lock"]
    assert not (folder.state / "http.port").exists()
    assert "Traceback" not in daemon.log.read_text()
    assert engine.write("r2", TOKENS)  # the engine never noticed


def test_the_supervisor_never_loads_torch() -> None:
    report = (
        "import canaryd.serve, canaryd.cli, sys; print([m for m in ('torch', 'numpy', 'pynvml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

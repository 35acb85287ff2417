"""A real daemon, real workers and real engine processes: what is found, and what happens when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    made = Daemon(folder, WORKERS__HOST="on", WORKERS__HANG_TIMEOUT="2")
    yield made
    made.stop()


@pytest.fixture
def engine(daemon: Daemon, folder: Folder) -> Iterator[EngineProcess]:
    made = EngineProcess(folder)
    wait_for("the attachment", lambda: made.ask("stats")["state"] == "attached")
    yield made
    made.kill()


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
    wait_for("the finding", lambda: daemon.metric("canaryd_mismatches_total", check="content") == count)


def memory_of(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_corruption_is_found_and_named(daemon: Daemon, engine: EngineProcess, folder: Folder) -> None:
    slots = settle(daemon, engine)
    assert daemon.metric("canaryd_slots", engine="tiny", state="settled") is not None
    assert daemon.metric("canaryd_findings_open", engine="tiny", gpu_uuid="host", check="content") == 0
    engine.flip(slots[3], region=1, byte=20, bit=5)
    wait_for("the finding", lambda: daemon.metric("canaryd_findings_open", engine="tiny", check="content") == 1)
    assert daemon.metric("canaryd_mismatches_total", engine="tiny", gpu_uuid="host", check="content") == 1
    (finding,) = json.loads(daemon.get("/findings")[1])
    detail = finding["detail"]
    assert (detail["group"], detail["slots"], detail["row"]) == ("full", [[slots[3]] * 2], "r1")
    assert (detail["region"], detail["byte_offset"], detail["classification"]) == ("layer1", 16, "bit_flip")
    assert int(detail["changed_bits"], 16) == 1 << (4 * 8 + 5)
    (record,) = [json.loads(line) for line in (folder.state / "findings.jsonl").read_text().splitlines()]
    assert record["id"] == finding["id"]
    status = daemon.status()
    assert (status["overall"], status["findings_open"]) == ("corrupt", 1)
    assert daemon.metric("canaryd_kernel_launches_total", gpu_uuid="host", kernel="digest")
    assert daemon.metric("canaryd_selftest_last_success_timestamp_seconds", gpu_uuid="host")
    assert daemon.metric("canaryd_selftest_failures_total", gpu_uuid="host") == 0
    assert memory_of(daemon.process.pid) < 80e6
    assert memory_of(daemon.worker()["pid"]) < 400e6


def test_a_worker_of_a_hundred_thousand_slots_stays_small(daemon: Daemon, folder: Folder) -> None:
    engine = EngineProcess(folder, pages=26_000)
    for row in range(50):
        engine.write(f"r{row}", 2000)
    wait_for("settled slots", lambda: daemon.settled(engine.name) == 100_000)
    wait_for("a whole pass", lambda: daemon.metric("canaryd_pass_last_completion_timestamp_seconds"))
    assert memory_of(daemon.worker()["pid"]) < 400e6
    assert memory_of(daemon.process.pid) < 80e6
    engine.kill()


def test_an_engine_that_dies_is_unmapped_and_remembered(daemon: Daemon, engine: EngineProcess, folder: Folder) -> None:
    damage(daemon, engine, settle(daemon, engine)[0])
    worker = daemon.worker()["pid"]
    assert "tiny-pool" in maps_of(worker)
    engine.kill()
    wait_for("the mapping's end", lambda: "tiny-pool" not in maps_of(worker), patience=5)
    assert daemon.engine_state("tiny") == "gone"
    assert daemon.metric("canaryd_engine_state", engine="tiny", state="gone") == 1
    assert daemon.metric("canaryd_slots", engine="tiny") is None
    # The page must not resolve before anyone saw it: findings end with the next process of that name.
    assert daemon.metric("canaryd_findings_open", engine="tiny", check="content") == 1
    successor = EngineProcess(folder)
    wait_for("the successor", lambda: successor.ask("stats")["state"] == "attached")
    assert daemon.metric("canaryd_findings_open", engine="tiny", check="content") == 0
    assert daemon.metric("canaryd_mismatches_total", engine="tiny", check="content") == 1
    damage(daemon, successor, settle(daemon, successor)[0], count=2)
    successor.kill()
    records = [json.loads(line) for line in (folder.state / "findings.jsonl").read_text().splitlines()]
    assert [each["record"] for each in records] == ["opened", "closed", "opened"]


def test_a_stopped_engine_is_stalled_and_stays_mapped(daemon: Daemon, engine: EngineProcess) -> None:
    slots = settle(daemon, engine)
    worker = daemon.worker()["pid"]
    engine.process.send_signal(signal.SIGSTOP)
    wait_for("the stall", lambda: daemon.engine_state("tiny") == "stalled")
    assert daemon.metric("canaryd_engine_state", engine="tiny", state="stalled") == 1
    assert "tiny-pool" in maps_of(worker)
    assert daemon.status()["overall"] == "degraded"
    engine.process.send_signal(signal.SIGCONT)
    wait_for("its return", lambda: daemon.engine_state("tiny") == "attached")
    damage(daemon, engine, slots[-1])


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


def test_a_host_worker_never_loads_triton(daemon: Daemon, engine: EngineProcess) -> None:
    settle(daemon, engine)
    assert "triton" not in maps_of(daemon.worker()["pid"])

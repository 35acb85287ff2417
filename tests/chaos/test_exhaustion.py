"""Resources run out in a real daemon: descriptors, the disk; and a hundred engines that come and go leave nothing."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon.engine import Engine
from daemon.harness import Daemon, EngineProcess, Folder, maps_of, wait_for
from daemon.test_live import attached, settle

ROUNDS = 100
WARM_UP = 20
MEBIBYTE = 1 << 20

pytestmark = pytest.mark.slow


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    folder = Folder()
    made = Daemon(folder, WORKERS__HOST="on")
    yield made
    made.stop()
    folder.remove()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def find_one(daemon: Daemon, engine: EngineProcess, row: str) -> None:
    """A fault on a new row is found."""
    before = daemon.metric("canaryd_findings_open", engine=engine.name) or 0.0
    engine.flip(settle(daemon, engine, row)[2])
    wait_for("the finding", lambda: daemon.metric("canaryd_findings_open", engine=engine.name) == before + 1)


def test_a_hundred_attachments_leave_nothing(daemon: Daemon) -> None:
    pids = daemon.process.pid, wait_for("the worker", lambda: daemon.worker().get("pid"))
    kept: list[tuple[int, int, int]] = []
    for number in range(ROUNDS):
        engine = Engine(str(daemon.folder.sockets), f"engine-{number % 3}", 16)
        wait_for("the attachment", lambda engine=engine: engine.client.stats.state == "attached")
        engine.write("row", 8)
        engine.client.close()
        wait_for("the unmapping", lambda number=number: f"engine-{number % 3}" not in maps_of(pids[1]))
        if number == WARM_UP:
            kept = [(descriptors(pid), len(maps_of(pid).splitlines()), resident(pid)) for pid in pids]
    for pid, (fds, maps, size) in zip(pids, kept, strict=True):
        wait_for("closed descriptors", lambda pid=pid, fds=fds: descriptors(pid) <= fds)
        assert len(maps_of(pid).splitlines()) <= maps + 8
        assert resident(pid) <= size + 8 * MEBIBYTE


def test_without_free_descriptors_watching_goes_on(daemon: Daemon) -> None:
    with attached(daemon, "first") as first:
        settle(daemon, first)
        pid = daemon.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid), limits[1]))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
            late.connect(str(daemon.folder.sockets / "side.sock"))
            first.flip(first.write("row", 4)[0])
            assert daemon.process.poll() is None
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        find_one(daemon, first, "after")
        with attached(daemon, "second") as second:
            find_one(daemon, second, "row")


def test_a_disk_that_takes_no_byte(daemon: Daemon) -> None:
    """The finding stands in the metrics at once, the failed writes are counted, and the file has it in the end."""
    with attached(daemon) as engine:
        slots = settle(daemon, engine)
        pid = daemon.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        engine.flip(slots[1])
        wait_for("the finding", lambda: daemon.metric("canaryd_findings_open", engine=engine.name) == 1)
        wait_for("a counted failure", lambda: (daemon.metric("canaryd_findings_write_failures_total") or 0) > 0)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        journal = daemon.folder.state / "findings.jsonl"
        wait_for("the record", lambda: journal.exists() and engine.name in journal.read_text())

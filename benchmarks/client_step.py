"""What the client costs the engine's thread per decode step: one begin, one final set of ROWS rows, one end.

Run: `python benchmarks/client_step.py [ROWS]`. A daemon double in a process of its own drains the stream. Prints the
median and the 99th percentile per step, in microseconds of wall time, conversions of columns included; once on a
thread that works in Python between steps, once on a thread that sleeps, so that every step starts on a cold core.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zmq

from canaryd.client import Client, Final, SnapshotState, export_host_tensor
from canaryd.wire.framing import decode_to_daemon, encode
from canaryd.wire.messages import Attach, Attached, GroupSpec, Identity, RegionSpec, Resync, Welcome
from canaryd.wire.side import SideListener

STEPS = 1000
STEP_SECONDS = 0.005


def serve(directory: Path) -> None:
    """Accept one client and throw its stream away."""
    listener = SideListener(directory / "side.sock")
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(f"ipc://{directory / 'engine.sock'}")
    while (connection := listener.accept()) is None:
        time.sleep(0.01)
    while connection.receive_hello() is None:
        time.sleep(0.01)
    connection.answer(Welcome())
    while True:
        route, *parts = router.recv_multipart()
        header, message = decode_to_daemon(parts)
        if isinstance(message, Attach):
            for answer in (Attached(described_ratio=1.0, scheme="native"), Resync(cause="attached")):
                router.send_multipart([route, *encode(header.session, 0, answer)])


def main() -> None:
    """Measure with a daemon, then without one."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    region = RegionSpec(name="kv", memory=0, offset=0, page_stride=64, slot_stride=64, piece_bytes=64)
    with tempfile.TemporaryDirectory() as directory:
        client = Client(
            socket_dir=directory,
            identity=Identity(engine="benchmark"),
            engine_kind="benchmark",
            engine_version="1",
            groups=[GroupSpec(name="full", num_pages=1024, page_size=1, regions=[region])],
            memory=[export_host_tensor(torch.zeros(1 << 16, dtype=torch.uint8))],
            frees=True,
            tiers="none",
            snapshot=SnapshotState,
        )
        client.start()
        measure("without a daemon, busy thread", client, count, work)
        measure("without a daemon, after a sleep", client, count, rest)
        daemon = multiprocessing.get_context("spawn").Process(target=serve, args=(Path(directory),), daemon=True)
        daemon.start()
        while client.stats.snapshots == 0:
            time.sleep(0.01)
        measure("with a daemon, busy thread", client, count, work)
        measure("with a daemon, after a sleep", client, count, rest)
        client.close()
        daemon.terminate()
        daemon.join()


def work() -> None:
    """Python work of the length of a step."""
    until = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < until:
        sum(range(100))


def rest() -> None:
    """Wait as long as a step."""
    time.sleep(STEP_SECONDS)


def measure(title: str, client: Client, count: int, between: Callable[[], None]) -> None:
    """Time the client's calls of many decode steps."""
    rows = [f"request-{number}" for number in range(count)]
    numbers = np.arange(count)
    ones = np.ones(count, dtype=np.int64)
    costs = []
    for step in range(STEPS):
        positions, tokens, slots = numbers + step, numbers ^ step, numbers
        started = time.perf_counter()
        op = client.begin()
        final = Final()
        final.write(0, rows, ones, positions, tokens, slots)
        client.end(op, final=final)
        costs.append((time.perf_counter() - started) * 1e6)
        between()
    costs.sort()
    p99 = costs[int(len(costs) * 0.99)]
    dropped = client.stats.dropped
    sys.stdout.write(f"{title}: {count} rows, median {statistics.median(costs):.1f} us, p99 {p99:.1f} us, {dropped=}\n")


if __name__ == "__main__":
    main()

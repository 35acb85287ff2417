"""What the client costs the engine's thread per decode step: one begin, one final set of ROWS rows, one end.

Run: `python benchmarks/client_step.py [ROWS]`. A daemon double in a process of its own drains the stream. Columns come
as lists, numpy arrays and CPU tensors; "busy" steps follow 5 ms of Python work, "slept" ones 5 ms of sleep, "cold" ones
a pass over 64 MiB of memory, which leaves nothing of the client in the core's own caches. Printed per step, in
microseconds: wall time of the engine's thread (p50, p99) and of its three parts (p50), CPU time of the engine's thread
(p50; two readings of its clock included), and the mean CPU time of the client's other threads.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zmq

from canaryd.client import Client, Final, SnapshotState, export_host_tensor
from canaryd.wire.framing import decode_to_daemon, encode
from canaryd.wire.messages import Attach, Attached, GroupSpec, Identity, RegionSpec, Resync, Welcome
from canaryd.wire.side import SideListener

STEPS = 400
STEP_SECONDS = 0.005

_MEMORY = np.zeros(8 << 20, dtype=np.int64)

KINDS: dict[str, Callable[[npt.NDArray[np.int64]], Any]] = {
    "lists": lambda values: values.tolist(),
    "numpy": lambda values: values,
    "torch": torch.from_numpy,
}


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
    """Measure without a daemon, then with one."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    region = RegionSpec(name="kv", memory=0, offset=0, page_stride=64, slot_stride=64, piece_bytes=64)
    print(f"{count} rows on {cpu_name()}, Python {sys.version.split()[0]}, microseconds per step")
    print(f"{'':26}{'p50':>7}{'p99':>8}  = {'begin':>6}{'write':>7}{'end':>6}{'CPU':>9}{'others':>9}")
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
        measure("no daemon, numpy, busy", client, count, "numpy", work)
        measure("no daemon, numpy, slept", client, count, "numpy", rest)
        daemon = multiprocessing.get_context("spawn").Process(target=serve, args=(Path(directory),), daemon=True)
        daemon.start()
        while client.stats.snapshots == 0:
            time.sleep(0.01)
        for kind in KINDS:
            measure(f"{kind}, busy", client, count, kind, work)
            measure(f"{kind}, slept", client, count, kind, rest)
            measure(f"{kind}, cold", client, count, kind, thrash)
        print(f"messages dropped: {client.stats.dropped}")
        client.close()
        daemon.terminate()
        daemon.join()


def cpu_name() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "an unknown processor")


def work() -> None:
    """Python work of the length of a step."""
    until = time.perf_counter() + STEP_SECONDS
    while time.perf_counter() < until:
        sum(range(100))


def rest() -> None:
    """Wait as long as a step."""
    time.sleep(STEP_SECONDS)


def thrash() -> None:
    """Fill the caches with something else."""
    np.add(_MEMORY, 1, out=_MEMORY)


def measure(title: str, client: Client, count: int, kind: str, between: Callable[[], None]) -> None:
    """Time the client's calls of many decode steps, each after `between`."""
    rows = [f"request-{number}" for number in range(count)]
    numbers = np.arange(count)
    make = KINDS[kind]
    parts: list[tuple[int, int, int, int, int]] = []
    others = 0
    for step in range(STEPS):
        columns = [make(values) for values in (np.ones_like(numbers), numbers + step, numbers ^ step, numbers)]
        others -= time.process_time_ns() - time.thread_time_ns()
        between()
        cpu = time.thread_time_ns()
        started = time.perf_counter_ns()
        op = client.begin()
        begun = time.perf_counter_ns()
        final = Final()
        final.write(0, rows, *columns)
        told = time.perf_counter_ns()
        client.end(op, final=final)
        ended = time.perf_counter_ns()
        cpu = time.thread_time_ns() - cpu
        others += time.process_time_ns() - time.thread_time_ns()
        parts.append((ended - started, begun - started, told - begun, ended - told, cpu))
    wall, begin, write, end, spent = (sorted(values) for values in zip(*parts, strict=True))
    print(
        f"{title:26}{quantile(wall, 0.5):7.1f}{quantile(wall, 0.99):8.1f}  = {quantile(begin, 0.5):6.1f}"
        f"{quantile(write, 0.5):7.1f}{quantile(end, 0.5):6.1f}{quantile(spent, 0.5):9.1f}{others / STEPS / 1e3:9.1f}"
    )


def quantile(ordered: Sequence[int], share: float) -> float:
    """A quantile of ordered nanoseconds, in microseconds."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] / 1e3


if __name__ == "__main__":
    main()

"""What the daemon costs an engine on one GPU: step times without it, and while it watches a pool at its default pace.

Run: `python benchmarks/engine_loss.py [GIB] [SECONDS]`. The engine is a stand-in: a CUDA graph of bandwidth-bound
matrix products, synchronised after each step, with a pool of GIB GiB attached (64 regions of 2 KiB per slot, all of it
held by live rows). Prints step times (mean, p50, p99), the loss, and what the daemon read meanwhile. Two baselines, one
before and one after, say how much of the difference is noise.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import torch

from canaryd.client import Client, SnapshotState, export_cuda_tensor, row_open
from canaryd.wire.messages import GroupSpec, Identity, RegionSpec

REGIONS = 64
SLOT_BYTES = 2048
PAGE_SIZE = 16
ROW_PAGES = 256
PRODUCTS = 24


def build_step() -> torch.cuda.CUDAGraph:
    """A step that reads about 3 GB of weights."""
    weights = [torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    hidden = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(hidden, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(PRODUCTS):
            torch.mm(hidden, weights[number % len(weights)])
    build_step.keep = weights, hidden  # type: ignore[attr-defined]
    return graph


def measure(graph: torch.cuda.CUDAGraph, seconds: float) -> list[float]:
    """Step times in milliseconds."""
    times = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def show(title: str, times: list[float], base: float | None = None) -> float:
    """Print a line; the mean."""
    ordered = sorted(times)
    mean = statistics.fmean(times)
    loss = "" if base is None else f"  loss {100 * (mean / base - 1):.2f} %"
    p99 = ordered[int(len(ordered) * 0.99)]
    sys.stdout.write(f"{title:34} mean {mean:.4f} ms  p50 {ordered[len(ordered) // 2]:.4f}  p99 {p99:.4f}{loss}\n")
    return mean


def scrape(port: int) -> dict[str, float]:
    """Totals over all labels, by metric."""
    totals: dict[str, float] = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def main() -> int:
    """Measure."""
    gib = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 15.0
    pages = (gib << 30) // (REGIONS * SLOT_BYTES * PAGE_SIZE)
    pool = torch.randint(0, 1 << 31, ((gib << 30) // 4,), dtype=torch.int32, device="cuda").view(torch.uint8)
    graph = build_step()
    measure(graph, 2.0)
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {
            "CANARYD_SOCKET_DIR": f"{directory}/sockets",
            "CANARYD_STATE_DIR": f"{directory}/state",
            "CANARYD_HTTP__PORT": "0",
            "CANARYD_HTTP__HOST": "127.0.0.1",
        }
        base = show("no daemon", measure(graph, seconds))
        daemon = subprocess.Popen([sys.executable, "-m", "canaryd.cli", "serve"], env=environment)
        try:
            port_file = Path(directory, "state", "http.port")
            while not port_file.exists():
                time.sleep(0.2)
            port = int(port_file.read_text())
            client = Client(
                socket_dir=f"{directory}/sockets",
                identity=Identity(engine="stand-in"),
                engine_kind="benchmark",
                engine_version="1",
                groups=[GroupSpec(name="full", num_pages=pages, page_size=PAGE_SIZE, regions=regions(pages))],
                memory=[export_cuda_tensor(pool)],
                frees=True,
                tiers="none",
                snapshot=lambda: SnapshotState(rows=rows(pages)),
            )
            client.start()
            slots = pages * PAGE_SIZE
            deadline = time.monotonic() + 120
            while scrape(port).get("canaryd_slots_stamped_total", 0) < slots and time.monotonic() < deadline:
                time.sleep(0.5)
            measure(graph, 3.0)
            before, started = scrape(port), time.monotonic()
            watched = measure(graph, seconds)
            after, elapsed = scrape(port), time.monotonic() - started
            show("watched, default pace", watched, base)
            read = after["canaryd_bytes_verified_total"] - before["canaryd_bytes_verified_total"]
            digests = after["canaryd_kernel_launches_total"] - before["canaryd_kernel_launches_total"]
            sys.stdout.write(
                f"  read {read / elapsed / 1e9:.2f} GB/s of {gib} GiB, {digests / elapsed:.0f} launches/s\n"
            )
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
                sys.stdout.write(f"  findings open: {json.load(answer).get('findings_open')}\n")
            client.close()
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(20)
        show("no daemon again", measure(graph, seconds), base)
    return 0


def regions(pages: int) -> list[RegionSpec]:
    """64 regions, one behind the other."""
    size = pages * PAGE_SIZE * SLOT_BYTES
    return [
        RegionSpec(
            name=f"part{number}",
            memory=0,
            offset=number * size,
            page_stride=PAGE_SIZE * SLOT_BYTES,
            slot_stride=SLOT_BYTES,
            piece_bytes=SLOT_BYTES,
            layer=number // 2,
            part="k" if number % 2 == 0 else "v",
        )
        for number in range(REGIONS)
    ]


def rows(pages: int) -> list[object]:
    """Live rows over all pages."""
    return [
        row_open(
            f"row{first}", 0, range(first, min(first + ROW_PAGES, pages)), PAGE_SIZE * min(ROW_PAGES, pages - first)
        )
        for first in range(0, pages, ROW_PAGES)
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Cold start: how long a fresh process with nothing cached takes until its first burst is done.

Run as a module this file is that process: `python -m benchmarks.gpu.cold` prints one JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any


def measure() -> dict[str, Any]:
    """Starts the process with an empty cache; its findings.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.cold"], env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"the cold start failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Builds a backend over 64 regions of 2 KiB, runs one small burst, and prints what that cost."""
    from benchmarks.gpu.burst import SMALL, BurstBench
    from benchmarks.gpu.compilation import watched
    from benchmarks.gpu.geometry import rows
    from benchmarks.gpu.workload import Place

    place = Place.of("cuda", 1 << 28)
    with watched() as seen:
        began = time.perf_counter()
        bench = BurstBench(place, layout=rows(*[2048] * 64), shape=SMALL, backend=None)
        bench.run(bench.work())
        seconds = time.perf_counter() - began
    found = {"cold_seconds": seconds, "cold_compiler_seconds": seen.seconds, "cold_kernels": len(seen.kernels)}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

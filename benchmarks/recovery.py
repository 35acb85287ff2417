"""How fast the daemon lets go and comes back: two figures of its promises, on real processes over host memory.

Run: `PYTHONPATH=.:kernels:tests python -m benchmarks.recovery [ROUNDS]`. Printed in seconds (p50, p99, largest): from
SIGKILL of an engine until its pool is unmapped in the worker; from SIGKILL of the worker until a slot that was guarded
is guarded again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from daemon.harness import Daemon, EngineProcess, Folder, maps_of
from daemon.test_live import attached, guarded, settle

PATIENCE = 30.0


def seconds_until(look: Callable[[], object]) -> float:
    """Seconds until `look` is true. Raises TimeoutError."""
    started = time.monotonic()
    while not look():
        if time.monotonic() - started > PATIENCE:
            raise TimeoutError(f"nothing after {PATIENCE:g} s")
        time.sleep(0.002)
    return time.monotonic() - started


def unmapping(daemon: Daemon) -> float:
    """An engine is killed while it is watched."""
    engine = EngineProcess(daemon.folder, "victim")
    seconds_until(lambda: engine.ask("stats")["state"] == "attached")
    settle(daemon, engine)
    worker = daemon.worker()["pid"]
    engine.process.kill()
    taken = seconds_until(lambda: "pool-victim" not in maps_of(worker))
    engine.kill()
    return taken


def covering(daemon: Daemon, engine: EngineProcess, slot: int) -> float:
    """The worker is killed; its successor guards what the dead one guarded."""
    pid = daemon.worker()["pid"]
    os.kill(pid, signal.SIGKILL)
    return seconds_until(lambda: daemon.worker().get("pid") not in {None, pid} and guarded(daemon, engine, slot))


def show(title: str, values: list[float]) -> None:
    """One line."""
    values = sorted(values)
    p99 = values[min(len(values) - 1, int(0.99 * len(values)))]
    print(f"{title:50} n={len(values):3}  p50 {values[len(values) // 2]:.3f}  p99 {p99:.3f}  largest {values[-1]:.3f}")


def main() -> None:
    """Kill engines, then workers."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    folder = Folder()
    daemon = Daemon(folder, WORKERS__HOST="on", WORKERS__RESTART_BACKOFF_MAX="0.5")
    try:
        show("engine killed -> pool unmapped, s", [unmapping(daemon) for _ in range(rounds)])
        with attached(daemon) as engine:
            slot = settle(daemon, engine)[0]
            taken = [covering(daemon, engine, slot) for _ in range(max(3, rounds // 10))]
            show("worker killed -> guarded again, s", taken)
    finally:
        daemon.stop()
        folder.remove()


if __name__ == "__main__":
    main()

"""What bursts do to another process's work that lives in the L2: a victim's step times with and without them.

The victim reads a buffer that fits the L2 over and over (as a decode step reads what it re-uses); the bursts come from
a process of their own, time-sliced, as the daemon's do. Run as a module this file is that process:
`python -m benchmarks.gpu.neighbour GIB PERIOD_MS`, until its standard input closes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.content import DigestPass
from benchmarks.gpu.geometry import rows
from benchmarks.gpu.timing import capture, xor_kernel
from benchmarks.gpu.workload import Place

VICTIM_BYTES = 30 << 20
BURST_BYTES = 2 << 30
PERIOD_MS = 100.0
_STEPS, _BLOCK = 8, 1024
_READS_PER_STEP = 24


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Microseconds per step of the victim, host to host."""

    mean_us: float
    p50_us: float
    p99_us: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """The victim alone, beside bursts, and alone again; and the share of its time that it lost."""

    alone: StepTimes
    beside: StepTimes
    alone_again: StepTimes
    burst_bytes: int
    period_ms: float

    @property
    def loss(self) -> float:
        """Mean step beside bursts over the mean of both times alone, minus 1."""
        return self.beside.mean_us / statistics.fmean((self.alone.mean_us, self.alone_again.mean_us)) - 1

    @property
    def noise(self) -> float:
        """How far the two times alone are apart."""
        return abs(self.alone_again.mean_us / self.alone.mean_us - 1)


class Victim:
    """A graph of reads of one 30 MiB buffer."""

    def __init__(self) -> None:
        self._words = torch.randint(1 << 62, (VICTIM_BYTES // 8,), device="cuda")
        self._out = torch.empty(self._words.numel() // (_STEPS * _BLOCK), dtype=torch.int64, device="cuda")
        programs = self._out.numel()
        self._launch = lambda _: xor_kernel[(programs,)](
            self._words, self._out, STEPS=_STEPS, BLOCK=_BLOCK, num_warps=4, num_stages=4
        )
        self._launch(0)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for number in range(_READS_PER_STEP):
                self._launch(number)

    def run(self, seconds: float) -> StepTimes:
        """Steps for some seconds, the host waiting for each."""
        times = []
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            self._graph.replay()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e6)
        ordered = sorted(times)
        return StepTimes(
            mean_us=statistics.fmean(times),
            p50_us=ordered[len(ordered) // 2],
            p99_us=ordered[int(len(ordered) * 0.99)],
            steps=len(ordered),
        )


def measure(*, seconds: float = 3.0) -> Neighbour:
    """Runs the victim here and the bursts in a process of their own."""
    victim = Victim()
    victim.run(1.0)
    alone = victim.run(seconds)
    command = [sys.executable, "-m", "benchmarks.gpu.neighbour", str(BURST_BYTES), str(PERIOD_MS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bursts:
        assert bursts.stdin is not None  # noqa: S101 - both are pipes
        assert bursts.stdout is not None  # noqa: S101
        if bursts.stdout.readline() != "ready\n":
            raise RuntimeError("the process that sends bursts did not start")
        victim.run(0.5)
        beside = victim.run(seconds)
        bursts.stdin.close()
        bursts.wait(30)
    again = victim.run(seconds)
    return Neighbour(alone=alone, beside=beside, alone_again=again, burst_bytes=BURST_BYTES, period_ms=PERIOD_MS)


def main() -> int:
    """Sends bursts until standard input closes."""
    import select

    size, period = int(sys.argv[1]), float(sys.argv[2]) / 1000
    place = Place.of("cuda", size + (1 << 20))
    slots = size // (64 * 2048)
    work = DigestPass(place, slots, layout=rows(*[2048] * 64)(place, slots), scan=False)
    with torch.cuda.stream(torch.cuda.Stream(priority=0)):
        graph, _ = capture(lambda number: work.launch(number, "triton"), sets=1, at_least_us=0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], period)[0]:
        graph.replay()
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())

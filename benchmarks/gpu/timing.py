"""GPU time by graph replay, and the two ceilings of a run: reading, and copying."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

REPLAY_US = 4000.0
"""A graph holds at least this much work, so that its own launch does not count."""
MEASURE_US = 400_000.0
"""GPU time spent on the samples of one row."""
_FEWEST, _MOST = 15, 100
_MOST_LAUNCHES = 512


@dataclass(frozen=True, kw_only=True)
class Times:
    """Microseconds per launch."""

    p20: float
    p50: float
    p80: float
    launches_per_replay: int
    replays: int


def summary(samples: list[float], *, launches_per_replay: int) -> Times:
    """Percentiles of samples in microseconds per launch (nearest rank)."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]

    return Times(p20=at(0.2), p50=at(0.5), p80=at(0.8), launches_per_replay=launches_per_replay, replays=len(ordered))


def capture(
    launch: Callable[[int], None], *, sets: int, at_least_us: float = REPLAY_US
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of launches over the sets in turn, `at_least_us` long if that many fit, and how many those are."""
    for number in range(sets):
        launch(number)
    single = _elapsed(lambda: [launch(number) for number in range(sets)]) / sets
    wanted = math.ceil(at_least_us / max(single, 0.5))
    launches = sets * max(1, min(math.ceil(wanted / sets), _MOST_LAUNCHES // sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(launches):
            launch(number % sets)
    return graph, launches


def _elapsed(work: Callable[[], object]) -> float:
    """Microseconds between two events around work."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1000


def replay(graph: torch.cuda.CUDAGraph, launches: int, *, budget_us: float = MEASURE_US) -> list[float]:
    """Microseconds per launch of each replay, replays back to back."""
    graph.replay()
    torch.cuda.synchronize()
    once = _elapsed(graph.replay)
    replays = max(_FEWEST, min(_MOST, int(budget_us / once)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [float(first.elapsed_time(last)) * 1000 / launches for first, last in itertools.pairwise(events)]


def timed(launch: Callable[[int], None], *, sets: int) -> Times:
    """Time per launch."""
    graph, launches = capture(launch, sets=sets)
    return summary(replay(graph, launches), launches_per_replay=launches)


def timed_pair(first: Callable[[int], None], second: Callable[[int], None], *, sets: int) -> tuple[Times, Times]:
    """Two launches timed in turn, four times each, so that both see the same clocks and temperatures."""
    graphs = [capture(launch, sets=sets) for launch in (first, second)]
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(4):
        for (graph, launches), own in zip(graphs, samples, strict=True):
            own.extend(replay(graph, launches, budget_us=MEASURE_US / 4))
    one, other = (
        summary(own, launches_per_replay=launches) for own, (_, launches) in zip(samples, graphs, strict=True)
    )
    return one, other


@triton.jit
def _xor(a, b):
    return a ^ b


@triton.jit
def xor_kernel(words, out, STEPS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803 - as Triton's constants are
    """out[p] = xor of words [p*STEPS*BLOCK, (p+1)*STEPS*BLOCK), int64. Reads every word once; the floor of any read."""
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    base = words + program * STEPS * BLOCK
    value = tl.zeros([BLOCK], dtype=tl.int64)
    for step in tl.static_range(STEPS):
        value ^= tl.load(base + step * BLOCK + lane)
    tl.store(out + program, tl.reduce(value, 0, _xor))


_SHAPES = ((4, 1024, 4), (8, 1024, 4), (8, 512, 4), (4, 4096, 16), (4, 2048, 8))
"""(steps, block, warps) of the read ceiling; the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Bytes per second (of the medians) and what was moved."""

    read: float
    read_bytes: int
    read_shape: tuple[int, int, int]
    copy: float
    copy_bytes: int
    """Read plus written."""


def ceilings(arena: torch.Tensor, *, read_bytes: int) -> Ceilings:
    """The read ceiling by an XOR reduction of `read_bytes` of the arena, and a device-to-device copy inside it.

    The arena stays as it is.
    """
    words = arena[:read_bytes].view(torch.int64)
    best: tuple[float, tuple[int, int, int]] | None = None
    for steps, block, warps in _SHAPES:
        programs = words.numel() // (steps * block)
        out = torch.empty(programs, dtype=torch.int64, device=arena.device)

        def launch(_: int) -> None:
            xor_kernel[(programs,)](words, out, STEPS=steps, BLOCK=block, num_warps=warps, num_stages=4)  # noqa: B023

        speed = read_bytes / timed(launch, sets=1).p50 * 1e6
        if best is None or speed > best[0]:
            best = (speed, (steps, block, warps))
    assert best is not None  # noqa: S101 - there are shapes
    half = read_bytes // 2
    spare = torch.empty(half, dtype=torch.uint8, device=arena.device)

    def copy(_: int) -> None:
        spare.copy_(arena[:half])

    copied = timed(copy, sets=1)
    return Ceilings(
        read=best[0],
        read_bytes=read_bytes,
        read_shape=best[1],
        copy=2 * half / copied.p50 * 1e6,
        copy_bytes=2 * half,
    )

"""Compilations: how many, how long, and that sizes cause none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton

from benchmarks.gpu.workload import Place, Row


@dataclass
class Compilations:
    """What was compiled while `watched`: kernel names, one per compilation, and the compiler's seconds."""

    kernels: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cache_hits: int = 0


@contextlib.contextmanager
def watched() -> Iterator[Compilations]:
    """Counts what Triton compiles (or loads from its cache) while the context is open."""
    seen = Compilations()
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    before, listener = runtime.jit_post_compile_hook, compilation.listener

    def compiled(**event: Any) -> None:
        seen.kernels.append(event["fn"].name)

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        seen.seconds += times.total / 1e6
        seen.cache_hits += cache_hit

    runtime.jit_post_compile_hook, compilation.listener = compiled, listen
    try:
        yield seen
    finally:
        runtime.jit_post_compile_hook, compilation.listener = before, listener


def recompilations(row: Row, place: Place) -> list[str]:
    """What other sizes (and so capacities) of a row compile once it has run: must be nothing."""
    with watched() as seen:
        for size in row.other_sizes:
            row.build(place, size).launch(0, "triton")
    return seen.kernels

"""Speed of the CPU backend's digest: GB/s of row bytes on one core, beside the machine's own memory speed.

Run: `python benchmarks/cpu_digest.py [--seconds S] [--pool-mib M]`. Random slots of a pool that no cache holds, 64
regions per slot. Every case is measured in turn, again and again until the time is over, and the best call counts: on
a shared machine the others measure the neighbours. Calls of 16 slots are what one decode step stamps.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from canary_kernels import DigestTable, GroupLayout, Region, Scheme, launch_digest

REGIONS = 64
SLOT_SETS = 32
"""Random slot vectors per case, so that a call does not find the rows of the last one in a cache."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of `row_bytes` in each region, `slots` of them per call; `memories`: one allocation per region, or one."""

    row_bytes: int
    slots: int
    memories: int
    scheme: Scheme = "native"
    scan: bool = False

    def title(self) -> str:
        """One line of the table."""
        where = "one memory" if self.memories == 1 else f"{self.memories} memories"
        return f"{self.scheme}{' + NaN scan' if self.scan else ''}, {self.row_bytes} B, {self.slots} slots, {where}"


CASES = [
    *(
        Case(row_bytes=row_bytes, slots=slots, memories=memories)
        for memories in (1, REGIONS)
        for slots in (1024, 16)
        for row_bytes in (2048, 1152, 656, 256, 132)
    ),
    Case(row_bytes=2048, slots=1024, memories=1, scan=True),
    Case(row_bytes=2048, slots=1024, memories=1, scheme="sglang"),
]


def layout(case: Case, pool: torch.Tensor) -> GroupLayout:
    """Regions one after the other in the pool, each a contiguous [slots, row_bytes]."""
    slots = pool.numel() // REGIONS // case.row_bytes
    size = slots * case.row_bytes
    apart = case.memories > 1
    return GroupLayout(
        regions=tuple(
            Region(
                memory=pool[number * size : (number + 1) * size] if apart else pool,
                offset=0 if apart else number * size,
                page_stride=16 * case.row_bytes,
                slot_stride=case.row_bytes,
                piece_bytes=case.row_bytes,
                dtype="bfloat16",
            )
            for number in range(REGIONS)
        ),
        num_pages=slots // 16,
        page_size=16,
    )


def calls(case: Case, pool: torch.Tensor, generator: torch.Generator) -> Iterator[Callable[[], None]]:
    """Endless digest calls, each on other slots."""
    group = layout(case, pool)
    launch = partial(
        launch_digest,
        table=DigestTable(group, case.scheme),
        digests_out=torch.empty(case.slots, dtype=torch.int64),
        sums_out=torch.empty(case.slots, dtype=torch.int64),
        nonfinite_out=torch.empty(case.slots, dtype=torch.uint8) if case.scan else None,
    )
    sets = [torch.randint(0, group.num_slots, (case.slots,), generator=generator) for _ in range(SLOT_SETS)]
    return (partial(launch, slots=slots) for slots in itertools.cycle(sets))


def main() -> None:
    """Measure all cases and the machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="time to measure (default: %(default)s)")
    parser.add_argument("--pool-mib", type=int, default=512, help="size of the pool in MiB (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pool = torch.empty(arguments.pool_mib << 20, dtype=torch.uint8)
    words = pool.view(torch.int64)
    generator = torch.Generator().manual_seed(1)
    words.random_(generator=generator)
    copy = torch.empty_like(words[: words.numel() // 4])
    work: list[tuple[str, int, Iterator[Callable[[], object]]]] = [
        ("machine: read, sum in order", pool.numel(), itertools.repeat(words.sum)),
        ("machine: copy, bytes read", copy.numel() * 8, itertools.repeat(partial(copy.copy_, words[: copy.numel()]))),
    ]
    for case in CASES:
        work.append((case.title(), case.slots * case.row_bytes * REGIONS, calls(case, pool, generator)))
    best = [float("inf")] * len(work)
    until = time.perf_counter() + arguments.seconds
    while time.perf_counter() < until:
        for number, (_, _, steps) in enumerate(work):
            for call in itertools.islice(steps, 4):
                started = time.perf_counter()
                call()
                best[number] = min(best[number], time.perf_counter() - started)
    capability = torch.backends.cpu.get_cpu_capability()  # type: ignore[no-untyped-call]
    sys.stdout.write(f"torch {torch.__version__}, {capability}, one thread, pool of {arguments.pool_mib} MiB\n")
    for (title, size, _), seconds in zip(work, best, strict=True):
        sys.stdout.write(f"{title:50} {size / seconds / 1e9:6.2f} GB/s  {seconds * 1e6:9.0f} us\n")


if __name__ == "__main__":
    main()

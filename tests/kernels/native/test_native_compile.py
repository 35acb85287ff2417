"""Every kernel of the daemon's own path compiles for GPUs that this machine does not have."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from canary_kernels import GroupLayout, Region, Scheme
from canary_kernels.device.nonfinite import NOT_SCANNED, SCANS

from canaryd.backend.pool_backend import make_backend
from canaryd.watch.burst import Burst, CompareWork, GroupWork, LinkWork, Runs, StampWork

sys.path.insert(0, str(Path(__file__).parents[1]))
from compile import CAPABILITIES, KernelSpec, compile_kernels

I64 = "*i64"


def spec(module: str, kernel: str, pointers: str, *, num_warps: int = 4, **constants: int | bool) -> KernelSpec:
    types = {name: "*u8" if name in {"region_bytes", "nonfinite"} else I64 for name in pointers.split()}
    return KernelSpec(
        module=f"canary_kernels.device.{module}",
        kernel=kernel,
        pointers=types,
        constants=constants,
        num_warps=num_warps,
    )


LINKS = (
    "records pages page_offsets first_offsets item_offsets first_positions first_prev_slots run_count item_count "
    "tokens heads rows count"
)
SIZES = "run_count item_count"
STAMP = "records slots positions run_numbers item_offsets seeds tokens generations digests sums " + SIZES
WALK = "records slots positions item_offsets seeds tokens " + SIZES
DIGESTS = (
    (16, False, True, NOT_SCANNED.value, 256),
    (16, True, True, SCANS["bfloat16"], 32),
    (8, False, False, SCANS["float8_e4m3fnuz"], 16),
    (4, True, False, SCANS["float32"], 2),
)
"""UNIT, PIECES, WHOLE, SCAN, LANES: each value of the first three."""
SPECS = [
    spec(
        "items",
        "plan_items_kernel",
        "pages page_offsets first_offsets item_offsets first_positions first_prev_slots out_slots out_positions "
        "out_prev_slots out_run_numbers " + SIZES,
        BLOCK=256,
    ),
    *(
        spec(
            "digest",
            "digest_kernel",
            "slots count table word_keys digests sums nonfinite",
            UNIT=unit,
            PIECES=pieces,
            WHOLE=whole,
            SCAN=scan,
            ROWS=1024 // lanes,
            LANES=lanes,
            STAGES=3,
        )
        for unit, pieces, whole, scan, lanes in DIGESTS
    ),
    *(
        spec(
            "digest",
            "region_bytes_kernel",
            "slots count table numbers word_keys region_bytes",
            UNIT=unit,
            ROWS=4,
            LANES=256,
        )
        for unit in (4, 16)
    ),
    *(
        spec(
            "fold",
            "fold_kernel",
            "slots count table numbers folds sums nonfinite",
            UNIT=unit,
            SCAN=scan,
            SLOTS=32,
            num_warps=1,
        )
        for unit, scan in ((16, NOT_SCANNED.value), (8, SCANS["bfloat16"]))
    ),
    spec("fold", "fold_total_kernel", "slots count folds digests region_bytes", SLOTS=32, WITH_BYTES=True, num_warps=1),
    *(spec("stamp", "stamp_kernel", STAMP, NATIVE=native, BLOCK=256, CHUNK=1024) for native in (True, False)),
    spec("stamp", "stamp_walk_kernel", WALK, num_warps=1),
    *(
        spec(
            "compare",
            "compare_kernel",
            "records slots digests sums rows count first_item item_count",
            HAS_FIRST=first,
            BLOCK=256,
        )
        for first in (True, False)
    ),
    spec("notes", "notes_kernel", "records slots digests sums nonfinite rows count item_count", BLOCK=256),
    spec("links", "links_kernel", LINKS, PAGE_SIZE=16, NATIVE=True, BLOCK=256),
    spec("links", "links_kernel", LINKS, PAGE_SIZE=3, NATIVE=False, BLOCK=256),
]


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    done = compile_kernels(SPECS, cache=tmp_path)
    assert len(done) == len(SPECS) * len(CAPABILITIES)
    assert all(one.cubin_bytes > 0 for one in done)


@pytest.mark.slow
def test_aligned_regions_are_read_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Half as wide, the loads cost the digest half its speed; any other unit has none."""
    digests = [one for one in SPECS if one.kernel == "digest_kernel"]
    done = compile_kernels(digests, cache=tmp_path, capabilities=(90,))
    assert [one.wide_copies > 0 for one in done] == [unit == 16 for unit, *_ in DIGESTS]


@pytest.mark.gpu
def test_sizes_never_recompile() -> None:
    """Number of runs, items and slots change; after a first launch of each kernel nothing is compiled again."""
    import triton

    compiled: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **arguments: compiled.append(arguments)
    try:
        for scheme in ("native", "sglang"):
            for number, count in enumerate((16, 1, 2, 33, 500)):
                _burst(scheme, count)
                if number == 0:
                    compiled.clear()
            assert compiled == []
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


def _burst(scheme: Scheme, count: int) -> None:
    """Stamps, links and compares `count` runs of one slot, in a pool of `count` pages."""
    memory = torch.zeros(count * 64, dtype=torch.uint8, device="cuda")
    region = Region(memory=memory, offset=0, page_stride=64, slot_stride=0, piece_bytes=64)
    group = GroupLayout(regions=(region,), num_pages=count, page_size=1)
    numbers = np.arange(count + 1, dtype=np.int64)
    zeros = np.zeros(count, dtype=np.int64)
    runs = Runs(pages=numbers[:-1], page_offsets=numbers, first_offsets=zeros, lengths=zeros + 1, first_positions=zeros)
    work = GroupWork(
        group=0,
        stamps=StampWork(runs=runs, tokens=zeros, generations=zeros, seeds=zeros),
        compare=CompareWork(runs=runs),
        links=LinkWork(runs=runs, tokens=zeros, prev_slots=zeros - 1, heads=zeros),
    )
    result = make_backend([group], scheme=scheme, key=3).run(Burst(number=1, works=(work,)))
    assert result.groups[0].compare is not None
    assert result.groups[0].compare.items.size == 0

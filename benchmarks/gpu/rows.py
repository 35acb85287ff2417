"""The table: which work is timed, at which size, and what it must reach."""

from __future__ import annotations

from benchmarks.gpu import geometry
from benchmarks.gpu.content import compare_pass, digest_pass
from benchmarks.gpu.contract import plan_pass, verify_pass, write_pass
from benchmarks.gpu.native import links_pass, stamp_decode, stamp_prefill
from benchmarks.gpu.workload import Goal, Row

MILLION = 1 << 20
ARENA_BYTES = (16 << 30) + (1 << 28)
"""The largest pool of the table, and some room for padding."""
READ_BYTES = 8 << 30

_MHA = geometry.rows(*[2048] * 64)
_SMALL = geometry.rows(*[256] * 64)
_LAYERS = 61
_FP8_AND_SCALES = geometry.rows(*[1024, 32] * 64)
_FOUR = geometry.rows(*[2048] * 4)
_VERIFY = f"verify, {MILLION:,} entries, no data"

ROWS: tuple[Row, ...] = (
    Row(name="digest + sum, 64 x 2 KiB", build=digest_pass(_MHA), size=65_536, goal=Goal(share=0.95)),
    Row(name="digest + sum, 64 x 256 B", build=digest_pass(_SMALL), size=524_288, goal=Goal(share=0.95)),
    Row(
        name="digest + sum, MLA rows of 1,152 B",
        build=digest_pass(geometry.rows(*[1152] * _LAYERS, page_size=64)),
        size=122_880,
        goal=Goal(share=0.9),
    ),
    Row(
        name="digest + sum, MLA fp8 rows of 656 B",
        build=digest_pass(geometry.rows(*[656] * _LAYERS, page_size=64)),
        size=196_608,
        goal=Goal(share=0.9),
    ),
    Row(
        name="digest + sum, indexer rows of 132 B",
        build=digest_pass(geometry.rows(*[132] * _LAYERS, page_size=64)),
        size=MILLION,
        goal=Goal(share=0.9),
    ),
    Row(
        name="digest + sum, HND pages of 16, 8 heads x 256 B",
        build=digest_pass(geometry.heads_first(regions=64, heads=8, head_bytes=256)),
        size=65_536,
        goal=Goal(share=0.9),
    ),
    Row(
        name="digest + sum, fp8 1 KiB and scales 32 B apart",
        build=digest_pass(_FP8_AND_SCALES),
        size=122_880,
        goal=Goal(share=0.9),
    ),
    Row(
        name="digest + sum, one packed buffer, 64 x 2 KiB",
        build=digest_pass(geometry.packed(regions=64, row_bytes=2048)),
        size=65_536,
        goal=Goal(share=0.9),
    ),
    Row(
        name="digest + sum + bf16 NaN scan, 64 x 2 KiB",
        build=digest_pass(_MHA, scan="bfloat16"),
        size=65_536,
        goal=Goal(share=0.88),
    ),
    Row(
        name="digest + sum + bf16 NaN scan, 64 x 256 B",
        build=digest_pass(_SMALL, scan="bfloat16"),
        size=524_288,
        goal=Goal(share=0.88),
    ),
    Row(name="compare, 64 x 2 KiB", build=compare_pass(_MHA), size=131_072, goal=Goal(over_base=0.01)),
    Row(name="compare, 64 x 256 B, 1 in 10^6 bad", build=compare_pass(_SMALL), size=MILLION, goal=Goal(over_base=0.01)),
    Row(
        name="stamp a prefill, 4,096 x 8 KiB",
        build=stamp_prefill(_FOUR),
        size=4096,
        goal=Goal(micros=20),
        check_sizes=(5, 600),
        beaten=201_585,
    ),
    *(
        Row(
            name=f"stamp a decode step, {count} x 64 x 2 KiB",
            build=stamp_decode(_MHA),
            size=count,
            goal=Goal(micros=20),
            check_sizes=(min(count, 3), count),
            other_sizes=(1, 16, 53, 300),
        )
        for count in (256, 16, 1)
    ),
    Row(
        name=f"{_VERIFY}, stride 32",
        build=verify_pass(prefix=4096),
        size=MILLION,
        goal=Goal(micros=25),
        check_sizes=(37, 5000),
        beaten=52,
    ),
    Row(
        name=f"{_VERIFY}, stride 64",
        build=verify_pass(prefix=4096, stride=64),
        size=MILLION,
        goal=Goal(micros=30),
        check_sizes=(37, 5000),
        beaten=52,
        floor_us=20,
    ),
    Row(
        name="plan, 256 x 4,096",
        build=plan_pass(prefix=4096),
        size=MILLION,
        goal=Goal(micros=15),
        check_sizes=(37, 5000),
        beaten=26.1,
    ),
    Row(
        name=f"row links, {MILLION:,} live slots, pages of 1",
        build=links_pass(row_length=4096, page_size=1),
        size=MILLION,
        goal=Goal(micros=25, below=f"{_VERIFY}, stride 64"),
        check_sizes=(37, 5000),
        beaten=78,
    ),
    Row(
        name=f"row links, {MILLION:,} live slots, pages of 16",
        build=links_pass(row_length=4096, page_size=16),
        size=MILLION,
        goal=Goal(micros=25, below=f"{_VERIFY}, stride 64"),
        check_sizes=(37, 5000),
        beaten=78,
    ),
    Row(
        name=f"sglang verify, {MILLION:,} entries, 2 KiB",
        build=verify_pass(prefix=4096, source_bytes=(2048,)),
        size=MILLION,
        goal=Goal(micros=900),
        beaten=2456,
    ),
    Row(
        name="sglang write of a prefill, 4,096 x 8 KiB",
        build=write_pass(extend=4096, source_bytes=(2048,) * 4),
        size=4096,
        goal=Goal(micros=500),
        beaten=201_585,
        floor_us=300,
    ),
    Row(
        name="sglang write of a decode step, 256 x 8 KiB",
        build=write_pass(extend=1, source_bytes=(2048,) * 4),
        size=256,
        goal=Goal(micros=59),
        beaten=59,
    ),
)
"""Sizes of digest and compare are slots, of stamps tokens or rows, of plan, verify and links entries."""

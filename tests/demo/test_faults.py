"""Injected bytes change what they hit and stay numbers that do not spread as NaN."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from canaryd.demo.faults.contents import bit_flips
from canaryd.demo.faults.injection import LARGEST, is_tame, noise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bench_of(dtype: torch.dtype, seed: int, data: bytearray | None = None) -> Any:
    written: list[bytearray] = []
    pool = SimpleNamespace(
        dtype=dtype,
        parts=lambda _group: 1,
        row_span=lambda _group, _slot, _part: (0, len(data or b"")),
        read=lambda _offset, _size: bytearray(data or b""),
        write=lambda _offset, fresh: written.append(fresh),
    )
    guard = SimpleNamespace(state="settled", generation=1)
    group = SimpleNamespace(number=0, page_size=16)
    return SimpleNamespace(
        pool=pool,
        rng=random.Random(seed),
        avoid=set(),
        written=written,
        ask=lambda _group, _slot: guard,
        pick_slot=lambda: (group, 3),
    )


def values(dtype: torch.dtype, seed: int, count: int) -> bytearray:
    made = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return bytearray(made.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_changes_every_number_and_keeps_it_small(dtype: torch.dtype) -> None:
    old = values(dtype, 1, 4096)
    fresh = noise(bench_of(dtype, 2), old)
    before, after = (torch.frombuffer(each, dtype=dtype).float() for each in (old, fresh))
    assert bool((after.abs() <= LARGEST).all())
    assert bool((before != after).all())
    assert not is_tame(bench_of(dtype, 3), bytearray(b"\xff" * 8)), "NaN"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_as_many_bits_flip_as_the_class_says(dtype: torch.dtype, count: int) -> None:
    for seed in range(60):
        data = values(dtype, seed, 16)
        bench = bench_of(dtype, seed, data)
        assert bit_flips(count)(bench).settled
        (fresh,) = bench.written
        flipped = sum((one ^ two).bit_count() for one, two in zip(data, fresh, strict=True))
        assert flipped == count, f"seed {seed}"
        assert is_tame(bench, fresh), f"seed {seed}"

"""The overlap proof against brute force on small random geometries, and on the layouts of real engines."""

from __future__ import annotations

import itertools
import random

import pytest

from canaryd.pool.overlap import Grid, OverlapProof, TooIrregular, grid

Dims = list[tuple[int, int]]
Raw = tuple[int, int, Dims]


def intervals(raw: Raw) -> list[tuple[int, int]]:
    start, width, dims = raw
    found = []
    for index in itertools.product(*(range(count) for _, count in dims)):
        first = start + sum(i * stride for i, (stride, _) in zip(index, dims, strict=True))
        found.append((first, first + width))
    return found


def overlap_by_listing(raws: list[Raw]) -> bool:
    everything = sorted(interval for raw in raws for interval in intervals(raw))
    return any(end > start for (_, end), (start, _) in itertools.pairwise(everything))


def random_raw(rng: random.Random) -> Raw:
    dims = [(4 * rng.randint(0, 40), rng.choice([1, 1, 2, 3, 5])) for _ in range(3)]
    return 4 * rng.randint(0, 60), 4 * rng.randint(1, 6), dims


def nested_raws(rng: random.Random) -> list[Raw]:
    """Regions that interleave as an engine's do, shaken a little in half of the cases."""
    width, pieces, slots, pages, parts = (rng.randint(1, 4) for _ in range(5))
    width *= 4
    order = [("piece", pieces), ("slot", slots), ("part", parts)]
    rng.shuffle(order)
    strides, size = {}, width
    for name, count in order:
        strides[name] = size
        size = size * count + rng.choice([0, 0, 4])
    raws = []
    for part in range(parts):
        dims = [(size, pages), (strides["slot"], slots), (strides["piece"], pieces)]
        raws.append((part * strides["part"], width, dims))
    if rng.random() < 0.5:
        number = rng.randrange(len(raws))
        start, width, dims = raws[number]
        raws[number] = (max(0, start + rng.choice([-4, 4, 8])), width + rng.choice([0, 0, 4]), dims)
    return raws


@pytest.mark.parametrize("shape", ["wild", "nested"])
def test_proof_agrees_with_listing(shape: str, seed: int) -> None:
    rng = random.Random(seed)
    seen = {True: 0, False: 0}
    for _ in range(1500):
        raws = nested_raws(rng) if shape == "nested" else [random_raw(rng) for _ in range(rng.randint(1, 3))]
        grids = [grid(*raw) for raw in raws]
        expected = overlap_by_listing(raws)
        pair = OverlapProof().find(grids)
        assert (pair is not None) == expected, raws
        if pair is not None:
            first, second = pair
            assert overlap_by_listing([raws[first]] if first == second else [raws[first], raws[second]]), (pair, raws)
        seen[expected] += 1
    assert min(seen.values()) > 150, f"the cases are one-sided: {seen}"


def test_grid_keeps_its_bytes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        raw = random_raw(rng)
        merged = grid(*raw)
        rebuilt = (merged.start, merged.width, [(dim.stride, dim.count) for dim in merged.dims])
        listed = {byte for start, end in intervals(raw) for byte in range(start, end)}
        assert {byte for start, end in intervals(rebuilt) for byte in range(start, end)} == listed
        assert merged.span == max(listed) - min(listed) + 1


def packed_pages(layers: int, pages: int, page_size: int, row: int) -> list[Grid]:
    """transformers: a block is [L0 K | L0 V | L1 K | …], millions of slots."""
    part = page_size * row
    block = 2 * layers * part
    return [grid(number * part, row, [(block, pages), (row, page_size)]) for number in range(2 * layers)]


def heads_first(layers: int, pages: int, page_size: int, heads: int, row: int) -> list[Grid]:
    """vLLM LBHNC: per layer (page, head, slot, K|V)."""
    page = heads * page_size * 2 * row
    return [
        grid(
            layer * pages * page + part * row, row, [(page, pages), (2 * row, page_size), (page_size * 2 * row, heads)]
        )
        for layer in range(layers)
        for part in range(2)
    ]


@pytest.mark.parametrize(
    "grids",
    [
        pytest.param(packed_pages(80, 200_000, 16, 2048), id="packed pages"),
        pytest.param(heads_first(80, 200_000, 16, 8, 256), id="heads first"),
        pytest.param(packed_pages(1024, 100_000, 256, 64), id="2048 regions"),
        pytest.param([grid(n * (1 << 34), 256, [(256, 1 << 20)]) for n in range(4096)], id="4096 flat buffers"),
    ],
)
def test_layouts_of_engines_are_proven_within_the_bound(grids: list[Grid]) -> None:
    assert OverlapProof().find(grids) is None
    touched = Grid(grids[-1].start - 4, grids[-1].width, grids[-1].dims)
    if touched.dims:  # one word too early: meets its neighbour
        assert OverlapProof().find([*grids[:-1], touched]) is not None


def test_slots_that_share_bytes_are_found() -> None:
    assert OverlapProof().find([grid(0, 128, [(4096, 1_000_000), (64, 16)])]) == (0, 0)
    assert OverlapProof().find([grid(0, 64, [(512, 1_000_000), (64, 16)])]) == (0, 0)
    assert OverlapProof().find([grid(0, 64, [(0, 2)])]) == (0, 0)


def test_contorted_regions_are_given_up_in_bounded_work() -> None:
    # coprime strides: every shift has to be tried, and there are a million
    first = grid(0, 4, [(4 * 100_003 * 2, 1_000_000)])
    second = grid(4, 4, [(4 * 100_019 * 2, 1_000_000)])
    with pytest.raises(TooIrregular):
        OverlapProof(work_limit=1000).find([first, second])

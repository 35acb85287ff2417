from __future__ import annotations

import numpy as np
import pytest
from canary_kernels.chain import chain_hashes

from canaryd.watch.chains import BLOCK, Chains


@pytest.mark.parametrize("scheme", ["native", "sglang"])
@pytest.mark.parametrize("lengths", [[1], [100], [3, 0, 257], [1] * 40, [0, 0]])
def test_chains_are_those_of_the_kernels(scheme: str, lengths: list[int]) -> None:
    columns = drawn(lengths)
    expected = chain_hashes(scheme, *columns, -99)
    np.testing.assert_array_equal(Chains(scheme, -99).runs(*columns), expected)


@pytest.mark.parametrize("lengths", [[BLOCK], [BLOCK - 1, 3, 0, 2 * BLOCK + 5, 1], [0, BLOCK, 0, 7]])
def test_long_runs_go_on_from_block_to_block(lengths: list[int]) -> None:
    columns = drawn(lengths)
    np.testing.assert_array_equal(Chains("native", 7).runs(*columns), chain_hashes("native", *columns, 7))


@pytest.mark.parametrize("scheme", ["native", "sglang"])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_single_steps_are_runs_of_one_token(scheme: str, count: int) -> None:
    seeds, tokens, positions, offsets = drawn([1] * count)
    expected = chain_hashes(scheme, seeds, tokens, positions, offsets, 99)[1]
    np.testing.assert_array_equal(Chains(scheme, 99).step(seeds, tokens, positions), expected)


def drawn(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Seeds, tokens, positions and offsets of runs of these lengths."""
    rng = np.random.default_rng(5)
    n = sum(lengths)
    seeds = rng.integers(-(1 << 63), 1 << 63, size=len(lengths), dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return seeds, rng.integers(-1, 1 << 40, size=n), rng.integers(0, 1 << 20, size=n), offsets

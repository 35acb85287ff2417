from __future__ import annotations

import numpy as np
import pytest
from canary_kernels.chain import chain_hashes

from canaryd.watch.counters import Counters
from canaryd.watch.group import Group
from tests.watch.harness import SLOT_BYTES, group_spec


@pytest.mark.parametrize("scheme", ["native", "sglang"])
@pytest.mark.parametrize("lengths", [[1], [100], [3, 0, 257], [1] * 40])
def test_chains_are_those_of_the_kernels(scheme: str, lengths: list[int]) -> None:
    rng = np.random.default_rng(5)
    group = Group(0, group_spec(), slot_bytes=SLOT_BYTES, scheme=scheme, chain_key=99, counters=Counters())
    n = sum(lengths)
    seeds = rng.integers(-(1 << 63), 1 << 63, size=len(lengths), dtype=np.int64)
    tokens, positions = rng.integers(-1, 1 << 40, size=n), rng.integers(0, 1 << 20, size=n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    before, after = group.chain(seeds, tokens, positions, offsets)
    expected_before, expected_after = chain_hashes(scheme, seeds, tokens, positions, offsets, 99)
    np.testing.assert_array_equal(before, expected_before)
    np.testing.assert_array_equal(after, expected_after)

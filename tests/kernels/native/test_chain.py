"""Chain hashes against steps in plain Python."""

from __future__ import annotations

import native_oracle as oracle
import numpy as np
import pytest
import torch
from canary_kernels import chain_hashes, chain_head
from canary_kernels.constants import unsigned


def test_heads():
    assert unsigned(chain_head("native")) == 0xDE7FAE23A9A1B716
    assert unsigned(chain_head("sglang")) == 0xDE7FAE23A9A1B716
    assert unsigned(chain_head("native", 5)) == oracle.s(oracle.ANCHOR ^ 5)


def test_pinned_native_chain():
    before, after = chain_hashes(
        "native",
        torch.tensor([chain_head("native")]),
        torch.tensor([7, 11, 13]),
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 3]),
    )
    assert [unsigned(value) for value in after.tolist()] == [
        0xB1E6BEFE68AA0155,
        0xBFC7FDDDB49E4E3E,
        0x9F74D986701ED97D,
    ]
    assert before.tolist() == [chain_head("native"), *after.tolist()[:2]]


LENGTHS = [[], [0], [1], [1, 1, 1, 1], [0, 5, 0, 0, 1, 17, 0], [300, 2], [1, 1, 0, 2], [*range(20), 9, 31]]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("skipping", [False, True])
def test_chain_is_the_oracles(lengths, skipping, scheme, seed):
    random = np.random.default_rng(seed)
    secret = int(random.integers(0, 1 << 64, dtype=np.uint64))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(offsets[-1])
    seeds = random.integers(-(1 << 63), 1 << 63, len(lengths), dtype=np.int64)
    tokens = random.integers(-1, 1 << 31, n, dtype=np.int64)
    positions = random.integers(0, 1 << 20, n, dtype=np.int64)
    if skipping:
        positions[random.random(n) < 0.4] = -1
    wanted: list[tuple[int, int]] = []
    for run, seed_ in enumerate(seeds.tolist()):
        part = slice(offsets[run], offsets[run + 1])
        wanted += oracle.chain(scheme, seed_, tokens[part].tolist(), positions[part].tolist(), secret)
    before, after = chain_hashes(scheme, seeds, tokens, positions, offsets, secret)
    assert isinstance(before, np.ndarray)
    assert list(zip(before.tolist(), after.tolist(), strict=True)) == wanted
    arguments = [torch.from_numpy(array) for array in (seeds, tokens, positions, offsets)]
    before_tensor, after_tensor = chain_hashes(scheme, *arguments, secret)
    assert list(zip(before_tensor.tolist(), after_tensor.tolist(), strict=True)) == wanted


def test_arguments_stay_as_they_were(scheme):
    """Read-only arrays are accepted, and no argument is written."""
    arrays = [np.array(values, dtype=np.int64) for values in ([3], [1, 2], [0, 1], [0, 2])]
    copies = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    before, after = chain_hashes(scheme, *arrays, 9)
    before += 1
    after += 1
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(array, copy)


def test_a_chain_may_be_cut_anywhere(scheme, seed):
    """The hash after a part is the seed of the rest."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 1000, 50, dtype=np.int64)
    positions = np.arange(50)
    whole, _ = chain_hashes(scheme, np.array([1]), tokens, positions, np.array([0, 50]), 7)
    cut = int(random.integers(1, 49))
    first, after = chain_hashes(scheme, np.array([1]), tokens[:cut], positions[:cut], np.array([0, cut]), 7)
    rest, _ = chain_hashes(scheme, after[-1:], tokens[cut:], positions[cut:], np.array([0, 50 - cut]), 7)
    assert np.array_equal(np.concatenate([first, rest]), whole)

"""Whose item is this one: the searches over sorted offsets against torch's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from canary_kernels.device.search import find_owner_of_one, find_run

BLOCK = 64


@triton.jit
def owners_kernel(offsets, count, n, firsts, owners, stride: tl.int64, BLOCK: tl.constexpr):  # noqa: N803
    """The owner of a tile's first item by one search, and of all its items."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    item = first + tl.arange(0, BLOCK)
    k = tl.load(count)
    mask = item < tl.load(n)
    tl.store(firsts + tl.program_id(0), find_owner_of_one(offsets, stride, k, first))
    last = tl.minimum(first + BLOCK, tl.load(n)) - 1
    tl.store(owners + item, find_run(offsets, stride, k, first, last, item, mask), mask=mask)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 5000, 65_537])
def test_owners_are_those_of_a_plain_search(count, stride, device, generator):
    # most runs are empty, the others shorter or longer than a tile
    lengths = torch.zeros(count, dtype=torch.int64)
    lengths[torch.randint(0, count, (20,), generator=generator)] = torch.randint(1, 200, (20,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    n = int(offsets[-1])
    spread = torch.zeros((count + 1) * stride, dtype=torch.int64)
    spread[::stride] = offsets
    firsts = torch.full((triton.cdiv(n, BLOCK),), -1, device=device)
    owners = torch.full((n,), -1, device=device)
    sizes = torch.tensor([count], device=device), torch.tensor([n], device=device)
    owners_kernel[(firsts.numel(),)](spread.to(device), *sizes, firsts, owners, stride, BLOCK=BLOCK)
    wanted = torch.searchsorted(offsets[1:], torch.arange(n), right=True)
    assert torch.equal(owners.cpu(), wanted)
    assert torch.equal(firsts.cpu(), wanted[::BLOCK])

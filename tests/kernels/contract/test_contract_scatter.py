"""The scatter launcher against the oracle."""

from __future__ import annotations

import random

import torch
from canary_kernels import launch_scatter_req_token_ids_kernel

from tests.kernels.contract import oracle
from tests.kernels.contract.cases import HUGE, POISON_32, int64, poisoned, strided
from tests.kernels.contract.conftest import Target


def check(target: Target, *, tokens: list[int], offsets: list[int], rows: list[int], shape: tuple[int, int]) -> None:
    pool = poisoned(*shape, dtype=torch.int32, device=target.device)
    wanted = oracle.scatter(
        tokens=tokens, offsets=offsets, rows=rows, pool=[[POISON_32] * shape[1]] * shape[0], width=shape[1]
    )
    for place in (torch.clone, strided):
        out = place(pool)
        launch_scatter_req_token_ids_kernel(
            flat_in=place(int64(tokens, target.device)),
            offsets=place(int64(offsets, target.device)),
            req_pool_indices=place(int64(rows, target.device)),
            pool_out=out,
            backend=target.backend,
        )
        assert out.tolist() == wanted


def test_random_batches_match_the_oracle(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        shape = (rng.randrange(1, 40), rng.randrange(1, 30))
        bs = rng.randrange(min(shape[0], 30))
        rows = rng.sample(range(shape[0]), bs)
        for r in range(bs):
            if rng.random() < 0.2:
                rows[r] = rng.choice((-1, shape[0], *HUGE))
        num_tokens = rng.choice((0, 1, 100, 600))
        offsets = sorted(rng.randrange(num_tokens + 1) for _ in range(bs + 1))
        if bs and rng.random() < 0.3:
            offsets[-1] = rng.choice((num_tokens + 5, num_tokens + 400))
        tokens = [rng.choice((rng.randrange(1 << 31), *HUGE)) for _ in range(num_tokens)]
        check(target, tokens=tokens, offsets=offsets, rows=rows, shape=shape)
    target.assert_ran("scatter_kernel")


def test_more_requests_than_a_tile(target: Target) -> None:
    bs = 1500
    rng = random.Random(3)
    lengths = [rng.randrange(4) for _ in range(bs)]
    offsets = [sum(lengths[:r]) for r in range(bs + 1)]
    check(target, tokens=list(range(offsets[-1])), offsets=offsets, rows=list(range(bs)), shape=(bs, 3))


def test_nothing_to_do(target: Target) -> None:
    check(target, tokens=[], offsets=[0], rows=[], shape=(2, 2))
    check(target, tokens=[1, 2], offsets=[1], rows=[], shape=(2, 2))
    check(target, tokens=[1, 2], offsets=[0, 2], rows=[1], shape=(2, 0))

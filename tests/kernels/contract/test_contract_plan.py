"""The plan launchers against the oracle: random batches, padding, windows, mappings, and what is out of range."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from canary_kernels import (
    VerifyPlan,
    WritePlan,
    launch_canary_plan_kernels,
    launch_plan_entries_kernel,
    launch_plan_offsets_kernel,
)

from tests.kernels.contract import oracle
from tests.kernels.contract.cases import HUGE, POISON_32, POISON_64, int32, int64, poisoned, strided, table_tensor
from tests.kernels.contract.conftest import Target

SCRATCH = 4097


@dataclass(frozen=True, kw_only=True)
class Batch:
    rows: list[int]
    prefixes: list[int]
    extends: list[int]
    table: list[list[int]]
    width: int
    mapping: list[int] | None
    window: int
    capacity: int
    req_capacity: int
    tokens: list[list[int]] | None
    tokens_width: int
    valid_lens: list[int]
    offset: int

    def offsets(self) -> oracle.Offsets:
        return oracle.plan_offsets(
            rows=self.rows,
            prefixes=self.prefixes,
            extends=self.extends,
            table=self.table,
            width=self.width,
            mapping=self.mapping,
            window=self.window,
            capacity=self.capacity,
        )

    def entries(self) -> list[tuple[int, int, int, int]]:
        return oracle.plan_entries(
            rows=self.rows,
            prefixes=self.prefixes,
            table=self.table,
            width=self.width,
            mapping=self.mapping,
            window=self.window,
            capacity=self.capacity,
            tokens=self.tokens,
            tokens_width=self.tokens_width,
            valid_lens=self.valid_lens,
            offset=self.offset,
        )


def draw_batch(rng: random.Random, *, wild: bool) -> Batch:
    bs = rng.choice((0, 1, 3, 8, 33))
    max_reqs, width = rng.randrange(1, 12), rng.randrange(1, 20)
    mapping = [rng.choice((rng.randrange(60), -1, 1 << 50)) for _ in range(100)] if rng.random() < 0.6 else None
    table = [
        [rng.choice((rng.randrange(100), -1, -(1 << 31), 100, 150)) for _ in range(width)] for _ in range(max_reqs)
    ]
    rows = [rng.randrange(max_reqs) for _ in range(bs)]
    prefixes = [rng.randrange(-1, width + 3) for _ in range(bs)]
    extends = [rng.randrange(-2, 6) for _ in range(bs)]
    if wild:
        for values in (rows, prefixes, extends):
            for r in range(bs):
                if rng.random() < 0.3:
                    values[r] = rng.choice((-1, max_reqs, *HUGE))
    tokens_width = rng.randrange(1, 20)
    tokens_rows = rng.randrange(1, 12)
    has_tokens = rng.random() < 0.7
    return Batch(
        rows=rows,
        prefixes=prefixes,
        extends=extends,
        table=table,
        width=width,
        mapping=mapping,
        window=rng.choice((0, 0, -3, 1, 4, 1 << 40)) if mapping else rng.choice((0, -3)),
        capacity=rng.choice((1, 7, 300, 300, 700)),
        req_capacity=bs + rng.randrange(1, 4),
        tokens=[[rng.randrange(-3, 1000) for _ in range(tokens_width)] for _ in range(tokens_rows)]
        if has_tokens
        else None,
        tokens_width=tokens_width,
        valid_lens=[rng.choice((rng.randrange(-1, tokens_width + 3), *HUGE)) for _ in range(bs)],
        offset=rng.choice((0, 1, -1, 5, *HUGE)),
    )


def poisoned_plans(batch: Batch, device: str) -> tuple[VerifyPlan, WritePlan]:
    capacity, requests = batch.capacity, batch.req_capacity
    one = {"dtype": torch.int32, "device": device}
    verify = VerifyPlan(
        verify_slot_indices=poisoned(capacity, device=device),
        verify_expected_tokens=poisoned(capacity, device=device),
        verify_expected_positions=poisoned(capacity, device=device),
        verify_prev_slot_indices=poisoned(capacity, device=device),
        verify_num_valid=poisoned(1, **one),
        enable=poisoned(1, **one),
    )
    write = WritePlan(
        write_offsets=poisoned(requests + 1, device=device),
        write_seed_slot_indices=poisoned(requests, device=device),
        write_num_valid_reqs=poisoned(1, **one),
    )
    return verify, write


def padded(values: list[int], length: int, filler: int) -> list[int]:
    return values + [filler] * (length - len(values))


def assert_entries(batch: Batch, entries: list[tuple[int, int, int, int]], outputs: list[torch.Tensor]) -> None:
    """`outputs`: slots, tokens, positions, predecessors."""
    for field, output in enumerate(outputs):
        assert output.tolist() == padded([entry[field] for entry in entries], batch.capacity, POISON_64)


@pytest.mark.parametrize("wild", [False, True])
def test_both_halves_match_the_oracle(target: Target, seed: int, wild: bool) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        batch = draw_batch(rng, wild=wild)
        device = target.device
        verify, write = poisoned_plans(batch, device)
        launch_canary_plan_kernels(
            verify_plan_out=verify,
            write_plan_out=write,
            req_pool_indices=int64(batch.rows, device),
            prefix_lens=int64(batch.prefixes, device),
            extend_seq_lens=int64(batch.extends, device),
            req_to_token=table_tensor(batch.table, batch.width, device),
            swa_window_size=batch.window,
            full_to_swa_index_mapping=None if batch.mapping is None else int64(batch.mapping, device),
            verify_capacity=batch.capacity,
            req_to_verify_expected_tokens=None
            if batch.tokens is None
            else table_tensor(batch.tokens, batch.tokens_width, device),
            req_to_verify_expected_tokens_valid_lens=int64(batch.valid_lens, device),
            kv_token_id_vs_position_offset=batch.offset,
            backend=target.backend,
        )
        expected = batch.offsets()
        assert write.write_offsets.tolist() == padded(expected.write, batch.req_capacity + 1, 0)
        assert write.write_seed_slot_indices.tolist() == padded(expected.seeds, batch.req_capacity, POISON_64)
        assert write.write_num_valid_reqs.tolist() == [expected.num_reqs]
        assert verify.verify_num_valid.tolist() == [expected.num_valid]
        assert verify.enable.tolist() == [expected.enable]
        assert_entries(
            batch,
            batch.entries(),
            [
                verify.verify_slot_indices,
                verify.verify_expected_tokens,
                verify.verify_expected_positions,
                verify.verify_prev_slot_indices,
            ],
        )
    target.assert_ran("plan_offsets_kernel", "plan_entries_kernel")


def launch_offsets(batch: Batch, target: Target) -> tuple[torch.Tensor, WritePlan, VerifyPlan]:
    device = target.device
    verify, write = poisoned_plans(batch, device)
    scratch = poisoned(SCRATCH, device=device)
    launch_plan_offsets_kernel(
        req_pool_indices=int64(batch.rows, device),
        prefix_lens=int64(batch.prefixes, device),
        extend_seq_lens=int64(batch.extends, device),
        req_to_token=table_tensor(batch.table, batch.width, device),
        full_to_swa_index_mapping=None if batch.mapping is None else int64(batch.mapping, device),
        out_verify_offsets_scratch=scratch,
        out_write_offsets=write.write_offsets,
        out_write_seed_slot_indices=write.write_seed_slot_indices,
        out_verify_num_valid=verify.verify_num_valid,
        out_verify_enable=verify.enable,
        out_write_num_valid_reqs=write.write_num_valid_reqs,
        swa_window_size=batch.window,
        verify_capacity=batch.capacity,
        backend=target.backend,
    )
    return scratch, write, verify


def test_offsets_alone_leave_the_rest_alone(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        batch = draw_batch(rng, wild=True)
        scratch, write, verify = launch_offsets(batch, target)
        expected = batch.offsets()
        assert scratch.tolist() == padded(expected.verify, SCRATCH, POISON_64)
        assert write.write_offsets.tolist() == padded(expected.write, batch.req_capacity + 1, POISON_64)
        assert write.write_seed_slot_indices.tolist() == padded(expected.seeds, batch.req_capacity, POISON_64)
        assert verify.verify_num_valid.tolist() == [expected.num_valid]
    target.assert_ran("plan_offsets_kernel")


def test_offsets_of_a_full_batch(target: Target) -> None:
    rng = random.Random(5)
    batch = Batch(
        rows=[rng.randrange(3) for _ in range(4096)],
        prefixes=[rng.choice((0, 2, (1 << 31) - 1, oracle.BAD)) for _ in range(4096)],
        extends=[rng.choice((0, 1, oracle.BAD)) for _ in range(4096)],
        table=[[1, 2, 3]] * 3,
        width=3,
        mapping=None,
        window=0,
        capacity=10,
        req_capacity=4096,
        tokens=None,
        tokens_width=1,
        valid_lens=[],
        offset=0,
    )
    scratch, write, verify = launch_offsets(batch, target)
    expected = batch.offsets()
    assert scratch.tolist() == expected.verify
    assert write.write_offsets.tolist() == expected.write
    assert write.write_seed_slot_indices.tolist() == expected.seeds
    assert (verify.verify_num_valid.item(), verify.enable.item()) == (10, 0)


def test_an_empty_batch_runs(target: Target) -> None:
    batch = draw_batch(random.Random(0), wild=False)
    empty = Batch(**{**batch.__dict__, "rows": [], "prefixes": [], "extends": [], "valid_lens": [], "req_capacity": 2})
    scratch, write, verify = launch_offsets(empty, target)
    assert scratch[:2].tolist() == [0, POISON_64]
    assert write.write_offsets.tolist() == [0, POISON_64, POISON_64]
    assert (verify.verify_num_valid.item(), verify.enable.item()) == (0, 1)
    assert write.write_num_valid_reqs.item() == 0


def launch_entries(
    batch: Batch, target: Target, *, spread: bool = False, enable: int = 1, scratch: list[int] | None = None
) -> list[torch.Tensor]:
    def place(tensor: torch.Tensor) -> torch.Tensor:
        return strided(tensor) if spread else tensor

    device = target.device
    outputs = [place(poisoned(batch.capacity, device=device)) for _ in range(4)]
    launch_plan_entries_kernel(
        req_pool_indices=place(int64(batch.rows, device)),
        prefix_lens=place(int64(batch.prefixes, device)),
        req_to_token=place(table_tensor(batch.table, batch.width, device)),
        full_to_swa_index_mapping=None if batch.mapping is None else place(int64(batch.mapping, device)),
        verify_offsets_scratch=place(int64(scratch or batch.offsets().verify, device)),
        verify_enable=int32([enable], device),
        req_to_verify_expected_tokens=None
        if batch.tokens is None
        else place(table_tensor(batch.tokens, batch.tokens_width, device)),
        req_to_verify_expected_tokens_valid_lens=place(int64(batch.valid_lens, device)),
        out_verify_slot_indices=outputs[0],
        out_verify_expected_tokens=outputs[1],
        out_verify_expected_positions=outputs[2],
        out_verify_prev_slot_indices=outputs[3],
        kv_token_id_vs_position_offset=batch.offset,
        swa_window_size=batch.window,
        backend=target.backend,
    )
    return outputs


def test_entries_of_strided_tensors(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        batch = draw_batch(rng, wild=True)
        assert_entries(batch, batch.entries(), launch_entries(batch, target, spread=True))


def test_entries_write_nothing_when_disabled_or_too_many(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    batch = draw_batch(rng, wild=False)
    while not batch.entries():
        batch = draw_batch(rng, wild=False)
    assert_entries(batch, [], launch_entries(batch, target, enable=0))
    beyond = [*batch.offsets().verify[:-1], batch.capacity + 1]
    assert_entries(batch, [], launch_entries(batch, target, scratch=beyond))
    assert_entries(batch, [], launch_entries(batch, target, scratch=[0] * len(beyond)))
    assert_entries(batch, batch.entries(), launch_entries(batch, target))


def test_poison_is_what_it_says() -> None:
    assert poisoned(2).tolist() == [POISON_64] * 2
    assert poisoned(1, dtype=torch.int32).tolist() == [POISON_32]

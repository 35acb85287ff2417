"""The write launcher against the oracle, and its rules one by one."""

from __future__ import annotations

import random

import pytest
import torch
from canary_kernels import CanaryLaunchTag, RealKvHashMode, WritePlan, launch_canary_write_kernel

from tests.kernels.contract import oracle
from tests.kernels.contract.cases import HUGE, Pool, assert_sinks, draw_pool, draw_ring, draw_slot, int32, int64
from tests.kernels.contract.conftest import Target

BAD_BIT = 64


def plan_of(offsets: list[int], seeds: list[int], num_valid: int, device: str) -> WritePlan:
    return WritePlan(
        write_offsets=int64(offsets, device),
        write_seed_slot_indices=int64(seeds, device),
        write_num_valid_reqs=int32([num_valid], device),
    )


def draw_offsets(rng: random.Random, requests: int, num_tokens: int) -> list[int]:
    offsets = sorted(rng.randrange(num_tokens + 1) for _ in range(requests + 1))
    if rng.random() < 0.4:
        offsets[rng.randrange(requests + 1)] = rng.choice((-1, 0, num_tokens, num_tokens + 1, *HUGE))
    return offsets


def assert_buffer(pool: Pool, buffer: torch.Tensor, written: oracle.Written) -> None:
    """Stored slots hold a legal record of the winning token; all other bytes are as they were."""
    for slot, data in enumerate(buffer.tolist()):
        assert bytes(data[32:]) == pool.buffer[slot][32:]
        record = oracle.record_at([bytes(data)], 0)
        if slot in written.records:
            assert record in written.records[slot][1]
        else:
            assert bytes(data[:32]) == pool.buffer[slot][:32]


def test_random_steps_match_the_oracle(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    bits = set()
    folded = False
    for _ in range(18):
        pool = draw_pool(rng)
        num_tokens, requests = rng.choice((0, 1, 30, 70, 140)), rng.randrange(1, 6)
        offsets = draw_offsets(rng, requests, num_tokens)
        seeds = [draw_slot(rng, len(pool.buffer)) for _ in range(requests)]
        num_valid = rng.choice((*[requests] * 5, requests - 1, -3, requests + 4))
        tokens = [rng.choice((rng.randrange(1000), *HUGE)) for _ in range(num_tokens)]
        positions = [i if rng.random() < 0.9 else rng.choice(HUGE) for i in range(num_tokens)]
        slots = [draw_slot(rng, len(pool.buffer)) for _ in range(num_tokens)]
        expected = None
        if rng.random() < 0.6:
            expected = (
                [token if rng.random() < 0.8 else 5 for token in tokens],
                [position if rng.random() < 0.8 else 6 for position in positions],
            )
        check_positions = rng.random() < 0.7
        ring_rows, index = draw_ring(rng)
        kind = rng.choice(list(CanaryLaunchTag))
        device = target.device
        context = pool.context(device, ring_rows=ring_rows, index=index, kind=kind, check_positions=check_positions)
        launch_canary_write_kernel(
            context=context,
            plan=plan_of(offsets, seeds, num_valid, device),
            input_ids=int64(tokens, device),
            positions=int64(positions, device),
            out_cache_loc=int64(slots, device),
            enable_write_input_assert=expected is not None,
            expected_input_tokens=None if expected is None else int64(expected[0], device),
            expected_input_positions=None if expected is None else int64(expected[1], device),
            backend=target.backend,
        )
        written = oracle.write(
            buffer=pool.buffer,
            sources=pool.sources,
            kind=int(kind),
            offsets=offsets,
            seeds=seeds,
            num_valid=num_valid,
            tokens=tokens,
            positions=positions,
            slots=slots,
            expected=expected,
            check_positions=check_positions,
        )
        assert_sinks(context, index, written)
        assert_buffer(pool, context.canary_buf, written)
        bits |= {row[7] for row in written.rows}
        folded = folded or bool(pool.sources and written.records)
    assert bits == {8, 16, 24, BAD_BIT}
    assert folded
    target.assert_ran("write_prepare_kernel", "write_fold_kernel", "write_chain_kernel")


def empty_pool(slots: int = 12) -> Pool:
    return Pool(buffer=[bytes(32)] * slots, stride=32, mode=RealKvHashMode.NONE, sources=[], source_args=[])


def write_step(
    target: Target,
    *,
    offsets: list[int],
    seeds: list[int],
    slots: list[int],
    positions: list[int] | None = None,
    pool: Pool | None = None,
    check_positions: bool = True,
) -> tuple[list[oracle.Record], list[list[int]], int]:
    """Records of all slots, violation rows, and how many slots were stored; token i is 100 + i."""
    device = target.device
    pool = pool or empty_pool()
    kind = CanaryLaunchTag.HEAD_V_FULL
    context = pool.context(device, ring_rows=20, index=0, kind=kind, check_positions=check_positions)
    launch_canary_write_kernel(
        context=context,
        plan=plan_of(offsets, seeds, len(seeds), device),
        input_ids=int64([100 + i for i in range(len(slots))], device),
        positions=int64(positions or list(range(len(slots))), device),
        out_cache_loc=int64(slots, device),
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
        backend=target.backend,
    )
    buffer = [bytes(slot) for slot in context.canary_buf.tolist()]
    records = [oracle.record_at(buffer, slot) for slot in range(len(buffer))]
    rows = context.violation_ring[: int(context.violation_write_index)].tolist()
    return records, rows, int(context.slot_run_counter) - 1000


def test_seeds_are_read_before_any_store(target: Target) -> None:
    # request 0 overwrites the slot that seeds request 1
    pool = empty_pool()
    old = (55, 4, 9, 0)
    pool.buffer[3] = b"".join(field.to_bytes(8, "little") for field in old)
    records, rows, stored = write_step(
        target, offsets=[0, 1, 2], seeds=[-1, 3], slots=[3, 4], positions=[0, 5], pool=pool
    )
    assert rows == []
    assert stored == 2
    assert records[3][0] == 100
    assert records[4][2] == oracle.signed(oracle.hash_after(old))


def test_a_negative_slot_is_skipped_and_slot_zero_written(target: Target) -> None:
    records, rows, stored = write_step(target, offsets=[0, 3], seeds=[-1], slots=[0, -1, 2], check_positions=False)
    assert (rows, stored) == ([], 2)
    assert records[0][:3] == (100, 0, oracle.signed(oracle.HEAD))
    assert records[2][2] == oracle.signed(oracle.mix3(oracle.HEAD, 100, 0))


def test_the_later_token_wins_a_slot_with_its_whole_record(target: Target) -> None:
    slots = [7] * 40 + [5, 7, 7]
    records, _, stored = write_step(target, offsets=[0, 20, 43], seeds=[-1, -1], slots=slots)
    assert stored == 43
    assert records[7][:2] == (142, 42)
    running = oracle.HEAD
    for i in range(20, 42):
        running = oracle.mix3(running, 100 + i, i)
    assert records[7][2] == oracle.signed(running)


def test_the_later_token_wins_even_if_its_request_comes_first(target: Target) -> None:
    # request 1 is unsound, and request 2 goes back to the tokens before request 0's
    records, rows, stored = write_step(
        target, offsets=[2, 4, 0, 2], seeds=[-1, -1, -1], slots=[7, 8, 7, 9], check_positions=False
    )
    assert (stored, len(rows)) == (4, 1)
    assert records[7][:3] == (102, 2, oracle.signed(oracle.HEAD))
    assert records[8][2] == oracle.signed(oracle.mix3(oracle.HEAD, 100, 0))


def test_positions_go_on_from_the_seed(target: Target) -> None:
    pool = empty_pool()
    pool.buffer[1] = (9).to_bytes(8, "little") + (3).to_bytes(8, "little") + bytes(16)
    arguments = {"offsets": [0, 3], "seeds": [1], "slots": [2, 3, 4], "positions": [4, 6, 7], "pool": pool}
    records, rows, _ = write_step(target, **arguments)
    assert [(row[1], row[2], row[4], row[6], row[7]) for row in rows] == [(3, 6, 101, 5, 16)]
    assert rows[0][5] == records[3][2], "the running hash before the token"
    assert write_step(target, **arguments, check_positions=False)[1] == []
    assert write_step(target, **{**arguments, "seeds": [-1]})[1] == [], "no position is expected at the anchor"


@pytest.mark.parametrize("slot", [12, *(value for value in HUGE if value > 0)])
def test_a_slot_beyond_the_buffer_is_skipped_with_a_row(target: Target, slot: int) -> None:
    records, rows, stored = write_step(target, offsets=[0, 3], seeds=[-1], slots=[1, slot, 2], check_positions=False)
    assert stored == 2
    assert [(row[1], row[7]) for row in rows] == [(slot, BAD_BIT)]
    assert records[2][2] == oracle.signed(oracle.mix3(oracle.HEAD, 100, 0)), "it does not advance the chain"


@pytest.mark.parametrize("seed_slot", [12, oracle.BAD])
def test_a_bad_seed_starts_at_the_anchor_with_a_row(target: Target, seed_slot: int) -> None:
    records, rows, stored = write_step(target, offsets=[0, 2], seeds=[seed_slot], slots=[1, 2], positions=[9, 3])
    assert [(row[1], row[7]) for row in rows] == [(seed_slot, BAD_BIT)]
    assert (stored, records[1][2]) == (2, oracle.signed(oracle.HEAD))


@pytest.mark.parametrize("offsets", [[0, 4, 5], [0, -1, 2], [3, 2, 2], [-2, 2, 2], [0, oracle.BAD, 2]])
def test_unsound_offsets_skip_the_request_with_one_row(target: Target, offsets: list[int]) -> None:
    records, rows, _ = write_step(target, offsets=offsets, seeds=[12, -1], slots=[1, 2, 3], check_positions=False)
    bad = [r for r in range(2) if offsets[r] < 0 or offsets[r + 1] < offsets[r] or offsets[r + 1] > 3]
    assert rows == [[1, -1, 0, 0, -1, 0, 0, BAD_BIT]] * len(bad)
    assert 0 in bad
    written = range(offsets[1], offsets[2]) if 1 not in bad else range(0)
    assert [slot for slot in range(1, 12) if records[slot][0]] == [1 + i for i in written]

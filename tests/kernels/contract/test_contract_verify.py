"""The verify launcher against the oracle, and its rules one by one."""

from __future__ import annotations

import random

import pytest
import torch
from canary_kernels import CanaryLaunchTag, FailReason, RealKvHashMode, VerifyPlan, launch_canary_verify_kernel

from tests.kernels.contract import oracle
from tests.kernels.contract.cases import HUGE, Pool, assert_sinks, draw_pool, draw_ring, draw_slot, int32, int64
from tests.kernels.contract.conftest import Target

Entry = tuple[int, int, int, int]


def plan_of(entries: list[Entry], num_valid: int, enable: int, device: str) -> VerifyPlan:
    return VerifyPlan(
        verify_slot_indices=int64([entry[0] for entry in entries], device),
        verify_expected_tokens=int64([entry[1] for entry in entries], device),
        verify_expected_positions=int64([entry[2] for entry in entries], device),
        verify_prev_slot_indices=int64([entry[3] for entry in entries], device),
        verify_num_valid=int32([num_valid], device),
        enable=int32([enable], device),
    )


def draw_entry(rng: random.Random, pool: Pool) -> Entry:
    slot = draw_slot(rng, len(pool.buffer))
    known = 0 <= slot < len(pool.buffer)
    token, position, _, _ = oracle.record_at(pool.buffer, slot) if known else (1, 2, 0, 0)
    return (
        slot,
        rng.choice((token, token, -1, 3)),
        position if rng.random() < 0.7 else rng.randrange(4),
        draw_slot(rng, len(pool.buffer)),
    )


def test_random_entries_match_the_oracle(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    seen, short = 0, 0
    for _ in range(30):
        pool = draw_pool(rng)
        entries = [draw_entry(rng, pool) for _ in range(rng.choice((5, 127, 130)))]
        num_valid = rng.choice((*[len(entries)] * 6, len(entries) - 1, -5, len(entries) + 9, 0))
        enable, check_tokens = rng.choice((*[1] * 8, 0, -1)), rng.random() < 0.7
        ring_rows, index = draw_ring(rng)
        kind = rng.choice(list(CanaryLaunchTag))
        context = pool.context(target.device, ring_rows=ring_rows, index=index, kind=kind)
        before = context.canary_buf.clone()
        launch_canary_verify_kernel(
            context=context,
            plan=plan_of(entries, num_valid, enable, target.device),
            check_verify_expected_token=check_tokens,
            backend=target.backend,
        )
        outcome = oracle.verify(
            buffer=pool.buffer,
            sources=pool.sources,
            kind=int(kind),
            entries=entries,
            num_valid=num_valid,
            enable=enable,
            check_tokens=check_tokens,
        )
        assert_sinks(context, index, outcome)
        assert torch.equal(context.canary_buf, before)
        limit = oracle.slot_limit(pool.buffer, pool.sources)
        short += sum(limit <= row[1] < len(pool.buffer) for row in outcome.rows if ring_rows == 500 and index == 0)
        seen |= sum({1 << row[7] for row in outcome.rows})
    target.assert_ran("canary_verify_kernel")
    assert short, "some sources must be shorter than the buffer"
    assert bin(seen).count("1") > 10, "the sweep must reach many combinations of bits"


def chained_pool(mode: RealKvHashMode = RealKvHashMode.NONE) -> Pool:
    """Slots 1 to 4 are a healthy chain of tokens 11 to 14 at positions 0 to 3; slot 0 is padding."""
    buffer = [bytes(32)]
    running = oracle.HEAD
    for step in range(4):
        token, position = 11 + step, step
        fields = (token, position, running, 0)
        buffer.append(b"".join(field.to_bytes(8, "little") for field in fields))
        running = oracle.mix3(running, token, position)
    return Pool(buffer=buffer, stride=32, mode=mode, sources=[], source_args=[])


HEALTHY: list[Entry] = [(1, 11, 0, -1), (2, 12, 1, 1), (3, 13, 2, 2), (4, 14, 3, 3)]


def verify_chain(target: Target, entries: list[Entry], *, check_tokens: bool = True) -> list[list[int]]:
    context = chained_pool().context(target.device, ring_rows=20, index=0, kind=CanaryLaunchTag.SWEEP_V_SWA)
    launch_canary_verify_kernel(
        context=context,
        plan=plan_of(entries, len(entries), 1, target.device),
        check_verify_expected_token=check_tokens,
        backend=target.backend,
    )
    return context.violation_ring[: int(context.violation_write_index)].tolist()


def test_a_healthy_chain_has_no_rows(target: Target) -> None:
    assert verify_chain(target, HEALTHY) == []


@pytest.mark.parametrize("slot", [-1, 5, 6, *HUGE])
def test_a_bad_slot_says_only_that(target: Target, slot: int) -> None:
    assert verify_chain(target, [(slot, 77, 5, 2)]) == [[11, slot, 0, 0, 77, 0, 0, FailReason.SLOT_OUT_OF_RANGE]]


def test_a_bad_predecessor_leaves_the_other_checks(target: Target) -> None:
    stored = oracle.record_at(chained_pool().buffer, 2)[2]
    bits = FailReason.SLOT_OUT_OF_RANGE | FailReason.VERIFY_POSITION_MISMATCH
    assert verify_chain(target, [(2, 12, 9, 5)]) == [[11, 2, 1, 12, 12, stored, stored, bits]]


def test_padding_is_skipped_and_padding_predecessors_say_nothing(target: Target) -> None:
    stored = oracle.record_at(chained_pool().buffer, 3)[2]
    assert verify_chain(target, [(0, 5, 5, 5), (3, -1, 2, 0)]) == []
    assert verify_chain(target, [(3, -1, 7, 0)]) == [[11, 3, 2, 13, -1, stored, stored, 2]]


def test_tokens_are_compared_only_if_asked(target: Target) -> None:
    wrong = [(1, 99, 0, -1)]
    assert [row[4:] for row in verify_chain(target, wrong)] == [
        [99, oracle.signed(oracle.HEAD), oracle.signed(oracle.HEAD), FailReason.VERIFY_TOKEN_MISMATCH]
    ]
    assert verify_chain(target, wrong, check_tokens=False) == []


def test_a_swapped_predecessor_breaks_the_chain(target: Target) -> None:
    (row,) = verify_chain(target, [(3, 13, 2, 1)])
    assert row[7] == FailReason.VERIFY_CHAIN_HASH_MISMATCH
    assert row[5] == oracle.record_at(chained_pool().buffer, 3)[2]
    assert row[6] == oracle.record_at(chained_pool().buffer, 2)[2]

"""The verify kernel in Triton, and its launch; the arguments are those of the launcher, already checked."""

from __future__ import annotations

import triton
import triton.language as tl

from canary_kernels.context import VerifyOrWriteContext, VerifyPlan, hashed_sources, slot_limit
from canary_kernels.device.mixing import mix3
from canary_kernels.device.real_kv import combined_folds, fold_entries
from canary_kernels.device.records import (
    HEAD,
    load_record,
    next_hash,
    record_alignment,
    record_rows,
)

_BLOCK = 256
_WARPS = 4


@triton.jit(do_not_specialize=["stride", "num_slots", "slot_limit", "capacity", "ring_capacity", "kind"])
def canary_verify_kernel(
    buffer,
    slots,
    prevs,
    expected_tokens,
    expected_positions,
    num_valid,
    enable,
    ring,
    ring_index,
    slot_counter,
    kernel_counter,
    folds,
    stride: tl.int64,
    num_slots: tl.int64,
    slot_limit: tl.int64,
    capacity: tl.int64,
    ring_capacity: tl.int64,
    kind: tl.int64,
    NUM_SOURCES: tl.constexpr,
    CHECK_TOKEN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stored record of each entry against mix3(predecessor), expected position and token, and its real-KV hash.

    A program has BLOCK - 1 entries, one lane each, and the one before them in lane 0: where an entry's predecessor is
    the slot beside it, as in all but the first of a request, the hash after it is there already, and no record is read
    twice. Reads the plan, the entry's record, other predecessors' records, and the folds of its bytes from each source,
    made beforehand; writes the counters and a row per failing entry.

    Floor: 32 bytes of plan and 32 of records per entry (64 where the stride is more, since memory is read so).
    """
    first = tl.program_id(0).to(tl.int64) * (BLOCK - 1)
    active = tl.load(num_valid).to(tl.int64)
    active = tl.minimum(tl.maximum(active, 0), capacity)
    active = tl.where(tl.load(enable) != 0, active, 0)
    if tl.program_id(0) == 0:
        tl.atomic_add(kernel_counter, 1, sem="relaxed")
        tl.atomic_add(slot_counter, active, sem="relaxed")
    if first < active:
        lane = tl.arange(0, BLOCK)
        entry = first - 1 + lane  # [BLOCK]
        mask = (entry >= 0) & (entry < active)
        slot = tl.load(slots + entry, mask=mask, other=0)
        mask = mask & (slot != 0)
        inside = mask & (slot > 0) & (slot < slot_limit)
        token, position, chain_hash, real_hash = load_record(buffer, stride, slot, inside, ALIGNMENT)

        mask = mask & (lane > 0)
        prev = tl.load(prevs + entry, mask=mask, other=0)
        expected_position = tl.load(expected_positions + entry, mask=mask, other=0)
        expected_token = tl.full((BLOCK,), -1, tl.int64)
        if CHECK_TOKEN:
            expected_token = tl.load(expected_tokens + entry, mask=mask, other=-1)
        beside = tl.maximum(lane - 1, 0)
        hash_beside = tl.gather(mix3(chain_hash, token, position), beside, 0)
        near = (prev > 0) & (prev == tl.gather(tl.where(inside, slot, 0), beside, 0))
        # slot 0 is padding: a predecessor there says nothing about the chain
        expected_hash = tl.where((prev == 0) | (prev >= num_slots), chain_hash, tl.where(near, hash_beside, HEAD))
        far = mask & inside & (prev > 0) & (prev < num_slots) & (near == 0)
        if tl.max(far.to(tl.int32), 0) > 0:
            hash_there = next_hash(buffer, stride, num_slots, prev, far, ALIGNMENT)
            expected_hash = tl.where(far, hash_there, expected_hash)
        real = combined_folds(folds, entry, capacity, mask & inside, NUM_SOURCES)

        bits = tl.where(chain_hash != expected_hash, 1, 0)
        bits = bits | tl.where(position != expected_position, 2, 0)
        bits = bits | tl.where(real_hash != real, 4, 0)
        bits = bits | tl.where((expected_token != -1) & (token != expected_token), 32, 0)
        bits = bits | tl.where(prev >= num_slots, 64, 0)
        bits = tl.where(inside, bits, 64)
        record_rows(
            ring,
            ring_capacity,
            ring_index,
            mask & (bits != 0),
            kind,
            slot,
            position,
            token,
            expected_token,
            chain_hash,
            tl.where(inside, expected_hash, 0),
            bits.to(tl.int64),
        )


def run_canary_verify(*, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool) -> None:
    """See `launch_canary_verify_kernel`."""
    buffer = context.canary_buf
    sources = hashed_sources(context)
    capacity = plan.verify_slot_indices.shape[0]
    limit = slot_limit(buffer.shape[0], sources)
    # without sources the kernel reads no fold: any int64 tensor stands in
    folds = fold_entries(plan, sources, limit) if sources else plan.verify_slot_indices
    # one program even for no capacity: the launch itself is counted
    canary_verify_kernel[(max(1, triton.cdiv(capacity, _BLOCK - 1)),)](
        buffer,
        plan.verify_slot_indices,
        plan.verify_prev_slot_indices,
        plan.verify_expected_tokens,
        plan.verify_expected_positions,
        plan.verify_num_valid,
        plan.enable,
        context.violation_ring,
        context.violation_write_index,
        context.slot_run_counter,
        context.kernel_run_counter,
        folds,
        buffer.shape[1],
        buffer.shape[0],
        limit,
        capacity,
        context.violation_ring.shape[0],
        int(context.kernel_kind),
        NUM_SOURCES=len(sources),
        CHECK_TOKEN=bool(check_verify_expected_token),
        ALIGNMENT=record_alignment(buffer),
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )

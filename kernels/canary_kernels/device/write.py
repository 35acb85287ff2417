"""The write kernels in Triton, and their launches; the arguments are those of the launcher, already checked.

Three launches in a row: `write_prepare_kernel` reads all seeds and elects the writer of each slot, `write_fold_kernel`
hashes the real bytes of all tokens in parallel, `write_chain_kernel` walks each request's chain and stores. The first
two store nothing in the canary buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from canary_kernels.context import VerifyOrWriteContext, WritePlan, hashed_sources, slot_limit
from canary_kernels.device.mixing import mix3
from canary_kernels.device.real_kv import SOURCE_SCALARS, fold_sources, source_arguments
from canary_kernels.device.records import (
    HEAD,
    POSITION,
    PREV_HASH,
    REAL_HASH,
    TOKEN,
    load_field,
    next_hash,
    record_rows,
    records_are_aligned,
    store_field,
)

_PREPARE_BLOCK = 256
_FOLD_BLOCK = 128
_CHAIN_BLOCK = 32


@triton.jit
def request_span(offsets, num_valid, request, capacity, num_tokens):
    """Whether the request is valid, whether its offsets are sound, and its span of tokens."""
    count = tl.minimum(tl.maximum(tl.load(num_valid).to(tl.int64), 0), capacity)
    valid = request < count
    start = tl.load(offsets + request, mask=valid, other=0)
    end = tl.load(offsets + request + 1, mask=valid, other=0)
    sound = (start >= 0) & (start <= end) & (end <= num_tokens)
    return valid, sound, start, end


@triton.jit(do_not_specialize=["num_tokens", "capacity", "stride", "num_slots", "slot_limit"])
def write_prepare_kernel(
    buffer,
    offsets,
    seeds,
    num_valid,
    slots,
    seed_hashes,
    seed_positions,
    owners,
    members,
    num_tokens: tl.int64,
    capacity: tl.int64,
    stride: tl.int64,
    num_slots: tl.int64,
    slot_limit: tl.int64,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """seed_hash = mix3(seed's record) or the anchor; owner[slot] = the highest token index that writes it.

    One program per request. Reads the seeds' records and the slots; writes hash and position of each seed, marks the
    tokens that will be stored, and elects owners. Nothing in the canary buffer changes.

    Floor: 24 bytes per seed, 8 read and 8 written per token.
    """
    request = tl.program_id(0).to(tl.int64)
    valid, sound, start, end = request_span(offsets, num_valid, request, capacity, num_tokens)
    if valid & sound:
        lane = tl.arange(0, BLOCK)  # [BLOCK]
        only = lane == 0
        seed = tl.load(seeds + request + lane * 0, mask=only, other=-1)
        readable = only & (seed >= 0) & (seed < num_slots)
        tl.store(seed_hashes + request + lane * 0, next_hash(buffer, stride, num_slots, seed, only, ALIGNED), mask=only)
        seed_position = load_field(buffer, stride, seed, POSITION, readable, ALIGNED)
        tl.store(seed_positions + request + lane * 0, seed_position, mask=only)
        while start < end:
            token = start + lane
            mask = token < end
            slot = tl.load(slots + token, mask=mask, other=-1)
            mask = mask & (slot >= 0) & (slot < slot_limit)
            tl.store(members + token, tl.full((BLOCK,), 1, tl.int32), mask=mask)
            tl.atomic_max(owners + slot, token.to(tl.int32), mask=mask, sem="relaxed")
            start += BLOCK


@triton.jit(do_not_specialize=["num_tokens", *SOURCE_SCALARS])
def write_fold_kernel(
    slots,
    members,
    real_hashes,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    row_words_0: tl.int64,
    page_size_0: tl.int64,
    token_words_0: tl.int64,
    read_words_0: tl.int64,
    row_words_1: tl.int64,
    page_size_1: tl.int64,
    token_words_1: tl.int64,
    read_words_1: tl.int64,
    row_words_2: tl.int64,
    page_size_2: tl.int64,
    token_words_2: tl.int64,
    read_words_2: tl.int64,
    row_words_3: tl.int64,
    page_size_3: tl.int64,
    token_words_3: tl.int64,
    read_words_3: tl.int64,
    num_tokens: tl.int64,
    NUM_SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """real_hash[token] = fold of its slot's bytes, for the tokens that will be stored.

    A tile of tokens per program, one lane each. Reads the source bytes, writes one int64 per token.

    Floor: the hashed bytes, 12 read and 8 written per token.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = token < num_tokens
    mask = mask & (tl.load(members + token, mask=mask, other=-1) == 1)
    slot = tl.load(slots + token, mask=mask, other=0)
    real = fold_sources(
        slot,
        mask,
        rows_0,
        rows_1,
        rows_2,
        rows_3,
        row_words_0,
        page_size_0,
        token_words_0,
        read_words_0,
        row_words_1,
        page_size_1,
        token_words_1,
        read_words_1,
        row_words_2,
        page_size_2,
        token_words_2,
        read_words_2,
        row_words_3,
        page_size_3,
        token_words_3,
        read_words_3,
        NUM_SOURCES,
    )
    tl.store(real_hashes + token, real, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "capacity", "stride", "num_slots", "slot_limit", "ring_capacity", "kind"])
def write_chain_kernel(
    buffer,
    offsets,
    seeds,
    num_valid,
    tokens,
    positions,
    slots,
    expected_tokens,
    expected_positions,
    chain_flag,
    seed_hashes,
    seed_positions,
    owners,
    real_hashes,
    ring,
    ring_index,
    slot_counter,
    kernel_counter,
    num_tokens: tl.int64,
    capacity: tl.int64,
    stride: tl.int64,
    num_slots: tl.int64,
    slot_limit: tl.int64,
    ring_capacity: tl.int64,
    kind: tl.int64,
    HAS_EXPECTED: tl.constexpr,
    HAS_REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """hash' = mix3(hash, token, position) from the seed's hash; each stored token gets the hash before it.

    One program (one warp) per request. It loads a tile of tokens at once, walks the chain over the tile in registers,
    and stores and checks the tile's lanes together. Only a slot's owner stores, with its whole record.

    Floor: 24 bytes read (40 with expected inputs, 8 more with real hashes) and 32 written per token.
    """
    request = tl.program_id(0).to(tl.int64)
    if request == 0:
        tl.atomic_add(kernel_counter, 1, sem="relaxed")
    valid, sound, start, end = request_span(offsets, num_valid, request, capacity, num_tokens)
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    nothing = tl.zeros((BLOCK,), tl.int64)
    if valid & (sound == 0):
        record_rows(ring, ring_capacity, ring_index, lane == 0, kind, nothing - 1, 0, 0, -1, 0, 0, 64)
    if valid & sound:
        seed = tl.load(seeds + request)
        seeded = (seed >= 0) & (seed < num_slots)
        bad_seed = (lane == 0) & (seed >= num_slots)
        record_rows(ring, ring_capacity, ring_index, bad_seed, kind, nothing + seed, 0, 0, -1, HEAD, 0, 64)
        checked = seeded & (tl.load(chain_flag) != 0)
        running = tl.load(seed_hashes + request)
        last_position = tl.load(seed_positions + request)
        stored_count = start * 0
        while start < end:
            index = start + lane
            mask = index < end
            slot = tl.load(slots + index, mask=mask, other=-1)
            token = tl.load(tokens + index, mask=mask, other=0)
            position = tl.load(positions + index, mask=mask, other=0)
            stored = mask & (slot >= 0) & (slot < slot_limit)
            stored_count += tl.sum(stored.to(tl.int64), 0)

            # the serial part: the hash and the position before each lane
            chain_hash = nothing
            previous = nothing
            step = start * 0
            steps = tl.minimum(end - start, BLOCK)
            while step < steps:
                here = lane == step
                chain_hash = tl.where(here, running, chain_hash)
                previous = tl.where(here, last_position, previous)
                # a skipped lane does not advance
                advance = tl.sum((here & stored).to(tl.int32), 0) > 0
                step_token = tl.sum(tl.where(here, token, 0), 0)
                step_position = tl.sum(tl.where(here, position, 0), 0)
                running = tl.where(advance, mix3(running, step_token, step_position), running)
                last_position = tl.where(advance, step_position, last_position)
                step += 1

            beyond = mask & (slot >= slot_limit)
            record_rows(ring, ring_capacity, ring_index, beyond, kind, slot, position, token, -1, chain_hash, 0, 64)
            if HAS_EXPECTED:
                want_token = tl.load(expected_tokens + index, mask=mask, other=0)
                want_position = tl.load(expected_positions + index, mask=mask, other=0)
                bits = tl.where(token != want_token, 8, 0) | tl.where(position != want_position, 16, 0)
                record_rows(
                    ring,
                    ring_capacity,
                    ring_index,
                    stored & (bits != 0),
                    kind,
                    slot,
                    position,
                    token,
                    want_token,
                    chain_hash,
                    want_position,
                    bits.to(tl.int64),
                )
            following = previous + 1
            jumps = stored & checked & (position != following)
            record_rows(
                ring, ring_capacity, ring_index, jumps, kind, slot, position, token, token, chain_hash, following, 16
            )

            owned = stored & (tl.load(owners + slot, mask=stored, other=-1).to(tl.int64) == index)
            real = nothing
            if HAS_REAL:
                real = tl.load(real_hashes + index, mask=owned, other=0)
            store_field(buffer, stride, slot, TOKEN, token, owned, ALIGNED)
            store_field(buffer, stride, slot, POSITION, position, owned, ALIGNED)
            store_field(buffer, stride, slot, PREV_HASH, chain_hash, owned, ALIGNED)
            store_field(buffer, stride, slot, REAL_HASH, real, owned, ALIGNED)
            start += BLOCK
        tl.atomic_add(slot_counter, stored_count, sem="relaxed")


def run_canary_write(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
) -> None:
    """See `launch_canary_write_kernel`. Scratch: 4 bytes per slot, 12 per token and 16 per request."""
    buffer = context.canary_buf
    sources = hashed_sources(context)
    num_slots, stride = buffer.shape
    limit = slot_limit(num_slots, sources)
    num_tokens = input_ids.shape[0]
    capacity = plan.write_seed_slot_indices.shape[0]
    # one program even for no capacity: the launch itself is counted
    grid = (max(1, capacity),)
    aligned = records_are_aligned(buffer)
    # one allocation for what starts as -1; both parts 16-byte aligned, or odd sizes would compile the kernels anew
    boundary = triton.cdiv(num_slots, 4) * 4
    marks = torch.full((boundary + num_tokens,), -1, dtype=torch.int32, device=buffer.device)
    owners, members = marks[:num_slots], marks[boundary:]
    seed_hashes = torch.empty(grid, dtype=torch.int64, device=buffer.device)
    seed_positions = torch.empty(grid, dtype=torch.int64, device=buffer.device)
    real_hashes = torch.empty(max(1, num_tokens), dtype=torch.int64, device=buffer.device)

    write_prepare_kernel[grid](
        buffer,
        plan.write_offsets,
        plan.write_seed_slot_indices,
        plan.write_num_valid_reqs,
        out_cache_loc,
        seed_hashes,
        seed_positions,
        owners,
        members,
        num_tokens,
        capacity,
        stride,
        num_slots,
        limit,
        ALIGNED=aligned,
        BLOCK=_PREPARE_BLOCK,
    )
    if sources and num_tokens:
        write_fold_kernel[(triton.cdiv(num_tokens, _FOLD_BLOCK),)](
            out_cache_loc,
            members,
            real_hashes,
            *source_arguments(sources, buffer),
            num_tokens,
            NUM_SOURCES=len(sources),
            BLOCK=_FOLD_BLOCK,
        )
    has_expected = expected_input_tokens is not None
    write_chain_kernel[grid](
        buffer,
        plan.write_offsets,
        plan.write_seed_slot_indices,
        plan.write_num_valid_reqs,
        input_ids,
        positions,
        out_cache_loc,
        expected_input_tokens if has_expected else input_ids,
        expected_input_positions if has_expected else positions,
        context.enable_chain_position_assert,
        seed_hashes,
        seed_positions,
        owners,
        real_hashes,
        context.violation_ring,
        context.violation_write_index,
        context.slot_run_counter,
        context.kernel_run_counter,
        num_tokens,
        capacity,
        stride,
        num_slots,
        limit,
        context.violation_ring.shape[0],
        int(context.kernel_kind),
        HAS_EXPECTED=has_expected,
        HAS_REAL=bool(sources),
        ALIGNED=aligned,
        BLOCK=_CHAIN_BLOCK,
        num_warps=1,
    )

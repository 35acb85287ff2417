"""The write kernels in Triton, and their launches; the arguments are those of the launcher, already checked.

Three launches in a row: `write_prepare_kernel` reads all seeds and elects the writer of each slot, `write_fold_kernel`
hashes the real bytes of the elected tokens in parallel, `write_chain_kernel` walks each request's chain and stores. The
first two store nothing in the canary buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from canary_kernels.context import VerifyOrWriteContext, WritePlan, hashed_sources, slot_limit
from canary_kernels.device.mixing import mix3
from canary_kernels.device.real_kv import FOLD_SLOTS, SOURCE_SCALARS, combined_folds, fold_source, source_arguments
from canary_kernels.device.records import (
    HEAD,
    POSITION,
    PREV_HASH,
    REAL_HASH,
    TOKEN,
    load_field,
    next_hash,
    record_alignment,
    record_rows,
    store_field,
)

_PREPARE_BLOCK = 1024
_CHAIN_BLOCK = 128
_CHAIN_UNROLL = 4


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
    num_tokens: tl.int64,
    capacity: tl.int64,
    stride: tl.int64,
    num_slots: tl.int64,
    slot_limit: tl.int64,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """seed_hash = mix3(seed's record) or the anchor; owner[slot] = the highest token index that writes it.

    One program per request. Reads the seeds' records and the slots; writes hash and position of each seed, and elects
    owners among the tokens of sound requests. Nothing in the canary buffer changes.

    Floor: 24 bytes per seed, 8 read and 4 written per token.
    """
    request = tl.program_id(0).to(tl.int64)
    valid, sound, start, end = request_span(offsets, num_valid, request, capacity, num_tokens)
    if valid & sound:
        lane = tl.arange(0, BLOCK)  # [BLOCK]
        only = lane == 0
        seed = tl.load(seeds + request + lane * 0, mask=only, other=-1)
        readable = only & (seed >= 0) & (seed < num_slots)
        tl.store(
            seed_hashes + request + lane * 0, next_hash(buffer, stride, num_slots, seed, only, ALIGNMENT), mask=only
        )
        seed_position = load_field(buffer, stride, seed, POSITION, readable, ALIGNMENT)
        tl.store(seed_positions + request + lane * 0, seed_position, mask=only)
        while start < end:
            token = start + lane
            mask = token < end
            slot = tl.load(slots + token, mask=mask, other=-1)
            mask = mask & (slot >= 0) & (slot < slot_limit)
            tl.atomic_max(owners + slot, token.to(tl.int32), mask=mask, sem="relaxed")
            start += BLOCK


@triton.jit(do_not_specialize=["num_tokens", "slot_limit", *SOURCE_SCALARS])
def write_fold_kernel(
    slots,
    owners,
    folds,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    row_pairs_0: tl.int64,
    page_size_0: tl.int64,
    token_pairs_0: tl.int64,
    read_pairs_0: tl.int64,
    row_pairs_1: tl.int64,
    page_size_1: tl.int64,
    token_pairs_1: tl.int64,
    read_pairs_1: tl.int64,
    row_pairs_2: tl.int64,
    page_size_2: tl.int64,
    token_pairs_2: tl.int64,
    read_pairs_2: tl.int64,
    row_pairs_3: tl.int64,
    page_size_3: tl.int64,
    token_pairs_3: tl.int64,
    read_pairs_3: tl.int64,
    num_tokens: tl.int64,
    slot_limit: tl.int64,
    NUM_SOURCES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """fold[source, token] = acc = s(acc ^ word) over its slot's bytes, for the tokens that were elected.

    Program (i, source): SLOTS tokens, one per thread. Reads slots and owners, and the source's bytes (of slot 0 for the
    other tokens of a tile that has an elected one); writes one int64 per token and source.

    Floor: the hashed bytes, and 12 read and 8 written per token and source.
    """
    token = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)  # [SLOTS]
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    inside = (slot >= 0) & (slot < slot_limit)
    elected = inside & (tl.load(owners + slot, mask=inside, other=-1).to(tl.int64) == token)
    if tl.sum(elected.to(tl.int32), 0) > 0:
        source = tl.program_id(1)
        fold = fold_source(
            source,
            tl.where(elected, slot, 0),
            rows_0,
            rows_1,
            rows_2,
            rows_3,
            row_pairs_0,
            page_size_0,
            token_pairs_0,
            read_pairs_0,
            row_pairs_1,
            page_size_1,
            token_pairs_1,
            read_pairs_1,
            row_pairs_2,
            page_size_2,
            token_pairs_2,
            read_pairs_2,
            row_pairs_3,
            page_size_3,
            token_pairs_3,
            read_pairs_3,
            NUM_SOURCES,
            SLOTS,
        )
        tl.store(folds + source * num_tokens + token, fold, mask=elected)


@triton.jit
def chain_step(hash_before, last_position, slots, tokens, positions, at, slot_limit):
    """Hash and position after the token at `at`: hash' = mix3(hash, token, position), unchanged for a skipped one."""
    slot = tl.load(slots + at)
    token = tl.load(tokens + at)
    position = tl.load(positions + at)
    stored = (slot >= 0) & (slot < slot_limit)
    hash_after = tl.where(stored, mix3(hash_before, token, position), hash_before)
    return hash_after, tl.where(stored, position, last_position)


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
    folds,
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
    NUM_SOURCES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """hash' = mix3(hash, token, position) from the seed's hash; each stored token gets the hash before it.

    One program (one warp) per request. A tile of tokens is loaded at once, and the next one is on its way while this
    one is walked: a step's token, position and slot come from the cache, long before the hash that they meet is known.
    Then the tile's lanes are checked and stored together. Only a slot's owner stores, with its whole record.

    Floor: a request's tokens times the latency of mix3. Bytes: 28 read (44 with expected inputs, 8 more per source) and
    32 written per token.
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
        index = start + lane
        slot = tl.load(slots + index, mask=index < end, other=-1)
        token = tl.load(tokens + index, mask=index < end, other=0)
        position = tl.load(positions + index, mask=index < end, other=0)
        while start < end:
            index = start + lane
            stored = (slot >= 0) & (slot < slot_limit)
            stored_count += tl.sum(stored.to(tl.int64), 0)
            owned = stored & (tl.load(owners + slot, mask=stored, other=-1).to(tl.int64) == index)
            real = combined_folds(folds, index, num_tokens, owned, NUM_SOURCES)
            following = index + BLOCK
            next_slot = tl.load(slots + following, mask=following < end, other=-1)
            next_token = tl.load(tokens + following, mask=following < end, other=0)
            next_position = tl.load(positions + following, mask=following < end, other=0)

            # the serial part: the hash and the position before each lane
            chain_hash = nothing
            previous = nothing
            at = start
            stop = tl.minimum(end, start + BLOCK)
            while at + UNROLL <= stop:
                for step in tl.static_range(UNROLL):
                    here = lane == (at + step - start)
                    chain_hash = tl.where(here, running, chain_hash)
                    previous = tl.where(here, last_position, previous)
                    running, last_position = chain_step(
                        running, last_position, slots, tokens, positions, at + step, slot_limit
                    )
                at += UNROLL
            while at < stop:
                here = lane == (at - start)
                chain_hash = tl.where(here, running, chain_hash)
                previous = tl.where(here, last_position, previous)
                running, last_position = chain_step(running, last_position, slots, tokens, positions, at, slot_limit)
                at += 1

            beyond = slot >= slot_limit
            jumps = stored & checked & (position != previous + 1)
            want_token = token
            want_position = position
            if HAS_EXPECTED:
                want_token = tl.load(expected_tokens + index, mask=stored, other=0)
                want_position = tl.load(expected_positions + index, mask=stored, other=0)
            bits = tl.where(token != want_token, 8, 0) | tl.where(position != want_position, 16, 0)
            differs = stored & (bits != 0)
            if tl.sum((beyond | jumps | differs).to(tl.int32), 0) > 0:
                record_rows(ring, ring_capacity, ring_index, beyond, kind, slot, position, token, -1, chain_hash, 0, 64)
                record_rows(
                    ring,
                    ring_capacity,
                    ring_index,
                    differs,
                    kind,
                    slot,
                    position,
                    token,
                    want_token,
                    chain_hash,
                    want_position,
                    bits.to(tl.int64),
                )
                record_rows(
                    ring,
                    ring_capacity,
                    ring_index,
                    jumps,
                    kind,
                    slot,
                    position,
                    token,
                    token,
                    chain_hash,
                    previous + 1,
                    16,
                )
            store_field(buffer, stride, slot, TOKEN, token, owned, ALIGNMENT)
            store_field(buffer, stride, slot, POSITION, position, owned, ALIGNMENT)
            store_field(buffer, stride, slot, PREV_HASH, chain_hash, owned, ALIGNMENT)
            store_field(buffer, stride, slot, REAL_HASH, real, owned, ALIGNMENT)
            slot = next_slot
            token = next_token
            position = next_position
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
    """See `launch_canary_write_kernel`. Scratch: 4 bytes per slot, 8 per token and source, 16 per request."""
    buffer = context.canary_buf
    sources = hashed_sources(context)
    num_slots, stride = buffer.shape
    limit = slot_limit(num_slots, sources)
    num_tokens = input_ids.shape[0]
    capacity = plan.write_seed_slot_indices.shape[0]
    # one program even for no capacity: the launch itself is counted
    grid = (max(1, capacity),)
    alignment = record_alignment(buffer)
    owners = torch.full((num_slots,), -1, dtype=torch.int32, device=buffer.device)
    seed_hashes = torch.empty(grid, dtype=torch.int64, device=buffer.device)
    seed_positions = torch.empty(grid, dtype=torch.int64, device=buffer.device)
    # without sources the kernels read no fold: any int64 tensor stands in
    folds = seed_hashes
    if sources:
        folds = torch.empty((len(sources), max(1, num_tokens)), dtype=torch.int64, device=buffer.device)

    write_prepare_kernel[grid](
        buffer,
        plan.write_offsets,
        plan.write_seed_slot_indices,
        plan.write_num_valid_reqs,
        out_cache_loc,
        seed_hashes,
        seed_positions,
        owners,
        num_tokens,
        capacity,
        stride,
        num_slots,
        limit,
        ALIGNMENT=alignment,
        BLOCK=_PREPARE_BLOCK,
    )
    if sources and num_tokens:
        write_fold_kernel[(triton.cdiv(num_tokens, FOLD_SLOTS), len(sources))](
            out_cache_loc,
            owners,
            folds,
            *source_arguments(sources, buffer),
            num_tokens,
            limit,
            NUM_SOURCES=len(sources),
            SLOTS=FOLD_SLOTS,
            num_warps=1,
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
        folds,
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
        NUM_SOURCES=len(sources),
        ALIGNMENT=alignment,
        BLOCK=_CHAIN_BLOCK,
        UNROLL=_CHAIN_UNROLL,
        num_warps=1,
    )

"""Plan kernels in Triton, and their launches; the arguments are those of the launchers, already checked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from canary_kernels.device.search import find_run

_MAX_LENGTH = (1 << 31) - 1
_OFFSETS_BLOCK = 1024
_ENTRIES_BLOCK = 256
_ENTRIES_WARPS = 4

MAX_LENGTH = tl.constexpr(_MAX_LENGTH)
BAD_SLOT = tl.constexpr((1 << 63) - 1)


@triton.jit
def window_start(prefix, window):
    """max(0, prefix - window) for a positive window, else 0."""
    return tl.where((window > 0) & (prefix > window), prefix - window, 0)


@triton.jit
def lookup(
    table,
    row_stride,
    column_stride,
    max_rows,
    width,
    rows,
    positions,
    wanted,
    lut,
    lut_stride,
    lut_len,
    HAS_LUT: tl.constexpr,
):
    """`table[row, position]` as int64, translated; BAD_SLOT where that is outside the table or the mapping.

    Lanes that are not wanted read nothing.
    """
    inside = wanted & (rows >= 0) & (rows < max_rows) & (positions >= 0) & (positions < width)
    raw = tl.load(table + rows * row_stride + positions * column_stride, mask=inside, other=-1).to(tl.int64)
    if HAS_LUT:
        mapped = inside & (raw >= 0) & (raw < lut_len)
        slots = tl.load(lut + raw * lut_stride, mask=mapped, other=BAD_SLOT)
        slots = tl.where(raw < 0, raw, slots)
    else:
        slots = raw
    return tl.where(inside, slots, BAD_SLOT)


@triton.jit(
    do_not_specialize=["bs", "max_rows", "width", "row_stride", "column_stride", "lut_len", "window", "capacity"]
)
def plan_offsets_kernel(
    pool_indices,
    prefix_lens,
    extend_lens,
    table,
    lut,
    out_verify_offsets,
    out_write_offsets,
    out_seeds,
    out_num_valid,
    out_enable,
    out_num_reqs,
    bs: tl.int64,
    max_rows: tl.int64,
    width: tl.int64,
    row_stride: tl.int64,
    column_stride: tl.int64,
    lut_len: tl.int64,
    window: tl.int64,
    capacity: tl.int64,
    HAS_LUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """verify_len = prefix - window_start, write_len = extend, both 0 for pool index 0; exclusive sums and seeds.

    One program walks the requests in tiles with a carry. Reads the three request vectors and one table (and mapping)
    entry per seed; writes both offset vectors and the seeds.

    Floor: 24 bytes read and 24 written per request, and 4 (12 with a mapping) per seed.
    """
    bs = bs.to(tl.int64)
    verify_total = bs * 0
    write_total = bs * 0
    start = bs * 0
    while start < bs:
        r = start + tl.arange(0, BLOCK)  # [BLOCK]
        mask = r < bs
        row = tl.load(pool_indices + r, mask=mask, other=0)
        active = mask & (row != 0)
        # for all requests: a mask that is loaded first would cost its latency
        prefix = tl.load(prefix_lens + r, mask=mask, other=0)
        prefix = tl.where(active, tl.minimum(tl.maximum(prefix, 0), MAX_LENGTH), 0)
        extend = tl.load(extend_lens + r, mask=mask, other=0)
        extend = tl.where(active, tl.minimum(tl.maximum(extend, 0), MAX_LENGTH), 0)
        verify = prefix - window_start(prefix, window)
        tl.store(out_verify_offsets + r, verify_total + tl.cumsum(verify, 0) - verify, mask=mask)
        tl.store(out_write_offsets + r, write_total + tl.cumsum(extend, 0) - extend, mask=mask)
        seeded = active & (prefix > 0) & (extend > 0)
        seed = lookup(
            table, row_stride, column_stride, max_rows, width, row, prefix - 1, seeded, lut, 1, lut_len, HAS_LUT
        )
        tl.store(out_seeds + r, tl.where(seeded, seed, -1), mask=mask)
        verify_total += tl.sum(verify, 0)
        write_total += tl.sum(extend, 0)
        start += BLOCK
    tl.store(out_verify_offsets + bs, verify_total)
    tl.store(out_write_offsets + bs, write_total)
    limit = tl.minimum(capacity.to(tl.int64), MAX_LENGTH)
    tl.store(out_num_valid, tl.minimum(verify_total, limit).to(tl.int32))
    tl.store(out_enable, (verify_total <= capacity).to(tl.int32))
    tl.store(out_num_reqs, bs.to(tl.int32))


@triton.jit(
    do_not_specialize=[
        "bs",
        "pool_indices_stride",
        "prefix_lens_stride",
        "max_rows",
        "width",
        "row_stride",
        "column_stride",
        "lut_stride",
        "lut_len",
        "offsets_stride",
        "expected_rows",
        "expected_width",
        "expected_row_stride",
        "expected_column_stride",
        "valid_lens_stride",
        "slots_stride",
        "tokens_stride",
        "positions_stride",
        "prevs_stride",
        "token_offset",
        "window",
        "capacity",
    ]
)
def plan_entries_kernel(
    pool_indices,
    prefix_lens,
    table,
    lut,
    offsets,
    enable,
    expected,
    valid_lens,
    out_slots,
    out_tokens,
    out_positions,
    out_prevs,
    bs: tl.int64,
    pool_indices_stride: tl.int64,
    prefix_lens_stride: tl.int64,
    max_rows: tl.int64,
    width: tl.int64,
    row_stride: tl.int64,
    column_stride: tl.int64,
    lut_stride: tl.int64,
    lut_len: tl.int64,
    offsets_stride: tl.int64,
    expected_rows: tl.int64,
    expected_width: tl.int64,
    expected_row_stride: tl.int64,
    expected_column_stride: tl.int64,
    valid_lens_stride: tl.int64,
    slots_stride: tl.int64,
    tokens_stride: tl.int64,
    positions_stride: tl.int64,
    prevs_stride: tl.int64,
    token_offset: tl.int64,
    window: tl.int64,
    capacity: tl.int64,
    HAS_LUT: tl.constexpr,
    HAS_EXPECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entry e of request r (the last with offsets[r] <= e): position = window_start(r) + e - offsets[r].

    A tile of entries per program; each lane finds its request by binary search over the offsets. Reads the table (and
    mapping) at the position and the one before, and the expected token; writes four int64 per entry.

    Floor: 32 bytes written and 4 read per entry, 12 more with a mapping, 4 more with expected tokens.
    """
    bs = bs.to(tl.int64)
    total = tl.load(offsets + bs * offsets_stride)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if (tl.load(enable) != 0) & (total <= capacity) & (first < total):
        e = first + tl.arange(0, BLOCK)  # [BLOCK]
        mask = e < total
        r = find_run(offsets, offsets_stride, bs, first, tl.minimum(first + BLOCK, total) - 1, e, mask)
        row = tl.load(pool_indices + r * pool_indices_stride, mask=mask, other=0)
        prefix = tl.load(prefix_lens + r * prefix_lens_stride, mask=mask, other=0)
        prefix = tl.minimum(tl.maximum(prefix, 0), MAX_LENGTH)
        position = window_start(prefix, window) + e - tl.load(offsets + r * offsets_stride, mask=mask, other=0)
        slot = lookup(
            table, row_stride, column_stride, max_rows, width, row, position, mask, lut, lut_stride, lut_len, HAS_LUT
        )
        prev = lookup(
            table,
            row_stride,
            column_stride,
            max_rows,
            width,
            row,
            position - 1,
            mask,
            lut,
            lut_stride,
            lut_len,
            HAS_LUT,
        )
        tl.store(out_positions + e * positions_stride, position, mask=mask)
        tl.store(out_slots + e * slots_stride, slot, mask=mask)
        tl.store(out_prevs + e * prevs_stride, tl.where(position == 0, -1, prev), mask=mask)
        token = tl.full((BLOCK,), -1, tl.int64)
        if HAS_EXPECTED:
            column = position + token_offset
            limit = tl.load(valid_lens + r * valid_lens_stride, mask=mask, other=0)
            known = mask & (column >= 0) & (column < limit) & (column < expected_width)
            known = known & (row >= 0) & (row < expected_rows)
            token = tl.load(
                expected + row * expected_row_stride + column * expected_column_stride, mask=known, other=-1
            ).to(tl.int64)
        tl.store(out_tokens + e * tokens_stride, token, mask=mask)


def run_plan_offsets(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor | None,
    out_verify_offsets_scratch: torch.Tensor,
    out_write_offsets: torch.Tensor,
    out_write_seed_slot_indices: torch.Tensor,
    out_verify_num_valid: torch.Tensor,
    out_verify_enable: torch.Tensor,
    out_write_num_valid_reqs: torch.Tensor,
    swa_window_size: int,
    verify_capacity: int,
) -> None:
    """See `launch_plan_offsets_kernel`."""
    mapping = full_to_swa_index_mapping
    plan_offsets_kernel[(1,)](
        req_pool_indices,
        prefix_lens,
        extend_seq_lens,
        req_to_token,
        out_write_offsets if mapping is None else mapping,
        out_verify_offsets_scratch,
        out_write_offsets,
        out_write_seed_slot_indices,
        out_verify_num_valid,
        out_verify_enable,
        out_write_num_valid_reqs,
        req_pool_indices.shape[0],
        req_to_token.shape[0],
        req_to_token.shape[1],
        req_to_token.stride(0),
        req_to_token.stride(1),
        0 if mapping is None else mapping.shape[0],
        _clamp(swa_window_size, _MAX_LENGTH),
        verify_capacity,
        HAS_LUT=mapping is not None,
        BLOCK=_OFFSETS_BLOCK,
        num_warps=8,
    )


def run_plan_entries(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_offsets_scratch: torch.Tensor,
    verify_enable: torch.Tensor,
    req_to_verify_expected_tokens: torch.Tensor | None,
    req_to_verify_expected_tokens_valid_lens: torch.Tensor | None,
    out_verify_slot_indices: torch.Tensor,
    out_verify_expected_tokens: torch.Tensor,
    out_verify_expected_positions: torch.Tensor,
    out_verify_prev_slot_indices: torch.Tensor,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
) -> None:
    """See `launch_plan_entries_kernel`."""
    capacity = out_verify_slot_indices.shape[0]
    bs = req_pool_indices.shape[0]
    if bs == 0 or capacity == 0:
        return
    mapping = full_to_swa_index_mapping
    expected = req_to_verify_expected_tokens
    valid_lens = req_to_verify_expected_tokens_valid_lens
    # pointers that a kernel without mapping or expected tokens never reads
    pool = req_to_token if expected is None else expected
    lens = prefix_lens if valid_lens is None else valid_lens
    plan_entries_kernel[(triton.cdiv(capacity, _ENTRIES_BLOCK),)](
        req_pool_indices,
        prefix_lens,
        req_to_token,
        prefix_lens if mapping is None else mapping,
        verify_offsets_scratch,
        verify_enable,
        pool,
        lens,
        out_verify_slot_indices,
        out_verify_expected_tokens,
        out_verify_expected_positions,
        out_verify_prev_slot_indices,
        bs,
        req_pool_indices.stride(0),
        prefix_lens.stride(0),
        req_to_token.shape[0],
        req_to_token.shape[1],
        req_to_token.stride(0),
        req_to_token.stride(1),
        1 if mapping is None else mapping.stride(0),
        0 if mapping is None else mapping.shape[0],
        verify_offsets_scratch.stride(0),
        pool.shape[0],
        pool.shape[1],
        pool.stride(0),
        pool.stride(1),
        lens.stride(0),
        out_verify_slot_indices.stride(0),
        out_verify_expected_tokens.stride(0),
        out_verify_expected_positions.stride(0),
        out_verify_prev_slot_indices.stride(0),
        _clamp(kv_token_id_vs_position_offset, 1 << 40),
        _clamp(swa_window_size, _MAX_LENGTH),
        capacity,
        HAS_LUT=mapping is not None,
        HAS_EXPECTED=expected is not None,
        BLOCK=_ENTRIES_BLOCK,
        num_warps=_ENTRIES_WARPS,
    )


def _clamp(value: int, limit: int) -> int:
    """`value` within [-limit, limit]: beyond it the result is the same, and int64 arithmetic cannot wrap."""
    return max(-limit, min(limit, value))

"""Plan kernels in torch; the arguments are those of the launchers, already checked."""

from __future__ import annotations

import torch

from canary_kernels.context import BAD_SLOT

_MAX_LENGTH = (1 << 31) - 1
_MAX_OFFSET = 1 << 40
"""Beyond it no position has a token, and the sum could wrap."""


def _window_starts(prefix: torch.Tensor, window: int) -> torch.Tensor:
    """max(0, prefix - window) for a positive window, else 0; int64 [bs]."""
    if window <= 0:
        return torch.zeros_like(prefix)
    return (prefix - min(window, _MAX_LENGTH)).clamp(min=0)


def _translate(raw: torch.Tensor, mapping: torch.Tensor | None) -> torch.Tensor:
    """Mapped slots; negative ones pass through, those beyond the mapping are bad. int64 [n]."""
    if mapping is None:
        return raw
    inside = (raw >= 0) & (raw < mapping.shape[0])
    out = torch.where(raw < 0, raw, BAD_SLOT)
    out[inside] = mapping[raw[inside]]
    return out


def _lookup(
    table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, mapping: torch.Tensor | None
) -> torch.Tensor:
    """`table[row, position]` translated; 2^63 - 1 where that is outside the table. int64 [n]."""
    inside = (rows >= 0) & (rows < table.shape[0]) & (positions >= 0) & (positions < table.shape[1])
    out = torch.full_like(rows, BAD_SLOT)
    out[inside] = _translate(table[rows[inside], positions[inside]].long(), mapping)
    return out


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
    bs = req_pool_indices.shape[0]
    active = req_pool_indices != 0
    prefix = prefix_lens.clamp(0, _MAX_LENGTH)
    verify_lens = torch.where(active, prefix - _window_starts(prefix, swa_window_size), 0)
    write_lens = torch.where(active, extend_seq_lens.clamp(0, _MAX_LENGTH), 0)
    for lens, out in ((verify_lens, out_verify_offsets_scratch), (write_lens, out_write_offsets)):
        out[:1] = 0
        out[1 : bs + 1] = lens.cumsum(0)

    seeded = (prefix > 0) & (write_lens > 0)
    seeds = _lookup(req_to_token, req_pool_indices, prefix - 1, full_to_swa_index_mapping)
    out_write_seed_slot_indices[:bs] = torch.where(seeded, seeds, -1)

    total = out_verify_offsets_scratch[bs]
    out_verify_num_valid[0] = total.clamp(max=min(verify_capacity, _MAX_LENGTH))
    out_verify_enable[0] = total <= verify_capacity
    out_write_num_valid_reqs[0] = bs


def find_owner(offsets: torch.Tensor, count: int, wanted: torch.Tensor) -> torch.Tensor:
    """For each wanted index the last of `offsets[:count]` that is not above it, by binary search; int64 [n].

    The same steps as the kernels', so that offsets that are not sorted give the same answer.
    """
    low = torch.zeros_like(wanted)
    high = torch.full_like(wanted, count)
    for _ in range(count.bit_length()):
        middle = (low + high) >> 1
        go = (high - low > 1) & (offsets[middle.clamp(max=count - 1)] <= wanted)
        stop = (high - low > 1) & ~go
        low = torch.where(go, middle, low)
        high = torch.where(stop, middle, high)
    return low


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
    bs = req_pool_indices.shape[0]
    total = int(verify_offsets_scratch[bs])
    if bs == 0 or total <= 0 or total > out_verify_slot_indices.shape[0] or int(verify_enable[0]) == 0:
        return
    entries = torch.arange(total, device=verify_offsets_scratch.device)
    owner = find_owner(verify_offsets_scratch, bs, entries)
    rows = req_pool_indices[owner]
    starts = _window_starts(prefix_lens.clamp(0, _MAX_LENGTH), swa_window_size)
    positions = starts[owner] + entries - verify_offsets_scratch[owner]

    out_verify_expected_positions[:total] = positions
    out_verify_slot_indices[:total] = _lookup(req_to_token, rows, positions, full_to_swa_index_mapping)
    previous = _lookup(req_to_token, rows, positions - 1, full_to_swa_index_mapping)
    out_verify_prev_slot_indices[:total] = torch.where(positions == 0, -1, previous)

    tokens = torch.full_like(positions, -1)
    if req_to_verify_expected_tokens is not None and req_to_verify_expected_tokens_valid_lens is not None:
        pool = req_to_verify_expected_tokens
        columns = positions + max(-_MAX_OFFSET, min(_MAX_OFFSET, kv_token_id_vs_position_offset))
        limit = req_to_verify_expected_tokens_valid_lens[owner].clamp(max=pool.shape[1])
        known = (columns >= 0) & (columns < limit) & (rows >= 0) & (rows < pool.shape[0])
        tokens[known] = pool[rows[known], columns[known]].long()
    out_verify_expected_tokens[:total] = tokens

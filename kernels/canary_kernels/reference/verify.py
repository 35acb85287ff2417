"""The verify kernel in torch; the arguments are those of the launcher, already checked."""

from __future__ import annotations

import torch

from canary_kernels.context import FailReason, VerifyOrWriteContext, VerifyPlan, hashed_sources, slot_limit
from canary_kernels.reference.real_kv import fold_sources
from canary_kernels.reference.records import load_records, next_hashes, record_rows


def run_canary_verify(*, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool) -> None:
    """See `launch_canary_verify_kernel`."""
    sources = hashed_sources(context)
    context.kernel_run_counter.add_(1)
    if int(plan.enable[0]) == 0:
        return
    active = max(0, min(int(plan.verify_num_valid[0]), plan.verify_slot_indices.shape[0]))
    context.slot_run_counter.add_(active)

    buffer = context.canary_buf
    num_slots = buffer.shape[0]
    slots = plan.verify_slot_indices[:active]
    entries = (slots != 0).nonzero()[:, 0]
    slots = slots[entries]
    prevs = plan.verify_prev_slot_indices[entries]
    expected_positions = plan.verify_expected_positions[entries]
    expected_tokens = plan.verify_expected_tokens[entries]
    if not check_verify_expected_token:
        expected_tokens = torch.full_like(expected_tokens, -1)

    inside = (slots >= 0) & (slots < slot_limit(num_slots, sources))
    stored = torch.zeros((slots.shape[0], 4), dtype=torch.int64, device=slots.device)
    stored[inside] = load_records(buffer, slots[inside])
    token, position, chain_hash, real_hash = stored.unbind(1)
    real = torch.zeros_like(slots)
    real[inside] = fold_sources(sources, slots[inside])
    unknown = (prevs == 0) | (prevs >= num_slots)
    expected_hash = torch.where(unknown, chain_hash, next_hashes(buffer, prevs))

    bits = (chain_hash != expected_hash) * FailReason.VERIFY_CHAIN_HASH_MISMATCH.value
    bits |= (position != expected_positions) * FailReason.VERIFY_POSITION_MISMATCH.value
    bits |= (real_hash != real) * FailReason.VERIFY_REAL_KV_HASH_MISMATCH.value
    bits |= ((expected_tokens != -1) & (token != expected_tokens)) * FailReason.VERIFY_TOKEN_MISMATCH.value
    bits |= (prevs >= num_slots) * FailReason.SLOT_OUT_OF_RANGE.value
    bits = torch.where(inside, bits, FailReason.SLOT_OUT_OF_RANGE.value)
    expected_hash = torch.where(inside, expected_hash, 0)

    kind = torch.full_like(slots, int(context.kernel_kind))
    rows = torch.stack((kind, slots, position, token, expected_tokens, chain_hash, expected_hash, bits), 1)
    record_rows(context, rows[bits != 0])

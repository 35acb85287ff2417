"""Both halves of the plan in one call."""

from __future__ import annotations

import torch

from canary_kernels.context import VerifyPlan, WritePlan
from canary_kernels.launches import Backend, resolve_backend
from canary_kernels.plan.entries import check_plan_entries, launch_plan_entries_kernel
from canary_kernels.plan.offsets import MAX_PLAN_REQUESTS, check_plan_offsets, launch_plan_offsets_kernel
from canary_kernels.validation import fail, leading_size

_KERNEL = "plan"


def validate_plan(
    *, bs: int, swa_window_size: int, has_swa_mapping: bool, verify_capacity: int, plan_verify_capacity: int
) -> None:
    """Check what only the plan launcher itself checks, in the contract's order.

    Raises:
        KernelArgumentError: kernel `plan`.
    """
    if swa_window_size > 0 and not has_swa_mapping:
        fail(
            _KERNEL,
            "full_to_swa_index_mapping",
            "required",
            "launch_canary_plan_kernels requires full_to_swa_index_mapping when swa_window_size > 0",
        )
    if bs > MAX_PLAN_REQUESTS:
        fail(
            _KERNEL,
            "bs",
            "range",
            f"launch_canary_plan_kernels supports at most bs={MAX_PLAN_REQUESTS} reqs per launch, got bs={bs}. "
            "Bump _PLAN_BS_BLOCK_SIZE if real workloads need this.",
        )
    if verify_capacity != plan_verify_capacity:
        fail(
            _KERNEL,
            "verify_capacity",
            "consistency",
            f"launch_canary_plan_kernels verify_capacity={verify_capacity} does not match "
            f"verify_plan_out.verify_slot_indices.shape[0]={plan_verify_capacity}",
        )


def launch_canary_plan_kernels(
    *,
    verify_plan_out: VerifyPlan,
    write_plan_out: WritePlan,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: torch.Tensor | None,
    req_to_verify_expected_tokens_valid_lens: torch.Tensor | None,
    kv_token_id_vs_position_offset: int,
    backend: Backend | None = None,
) -> None:
    """Fill both plans of a step: `launch_plan_offsets_kernel`, then `launch_plan_entries_kernel`.

    `write_plan_out.write_offsets` past the batch are zeroed. Shapes and dtypes are those of the two launchers.

    Raises:
        KernelArgumentError: kernel `plan`, `plan_offsets` or `plan_entries`, all before anything is written.
    """
    slots = verify_plan_out.verify_slot_indices
    validate_plan(
        bs=leading_size(req_pool_indices),
        swa_window_size=swa_window_size,
        has_swa_mapping=full_to_swa_index_mapping is not None,
        verify_capacity=verify_capacity,
        plan_verify_capacity=leading_size(slots),
    )
    scratch = torch.empty(MAX_PLAN_REQUESTS + 1, dtype=torch.int64, device=slots.device)
    check_plan_offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        out_verify_offsets_scratch=scratch,
        out_write_offsets=write_plan_out.write_offsets,
        out_write_seed_slot_indices=write_plan_out.write_seed_slot_indices,
        out_verify_num_valid=verify_plan_out.verify_num_valid,
        out_verify_enable=verify_plan_out.enable,
        out_write_num_valid_reqs=write_plan_out.write_num_valid_reqs,
        verify_capacity=verify_capacity,
    )
    check_plan_entries(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=scratch,
        verify_enable=verify_plan_out.enable,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        out_verify_slot_indices=slots,
        out_verify_expected_tokens=verify_plan_out.verify_expected_tokens,
        out_verify_expected_positions=verify_plan_out.verify_expected_positions,
        out_verify_prev_slot_indices=verify_plan_out.verify_prev_slot_indices,
    )
    backend = resolve_backend(_KERNEL, backend, slots)
    write_plan_out.write_offsets[req_pool_indices.shape[0] + 1 :].zero_()
    launch_plan_offsets_kernel(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        out_verify_offsets_scratch=scratch,
        out_write_offsets=write_plan_out.write_offsets,
        out_write_seed_slot_indices=write_plan_out.write_seed_slot_indices,
        out_verify_num_valid=verify_plan_out.verify_num_valid,
        out_verify_enable=verify_plan_out.enable,
        out_write_num_valid_reqs=write_plan_out.write_num_valid_reqs,
        swa_window_size=swa_window_size,
        verify_capacity=verify_capacity,
        backend=backend,
    )
    launch_plan_entries_kernel(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=scratch,
        verify_enable=verify_plan_out.enable,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        out_verify_slot_indices=slots,
        out_verify_expected_tokens=verify_plan_out.verify_expected_tokens,
        out_verify_expected_positions=verify_plan_out.verify_expected_positions,
        out_verify_prev_slot_indices=verify_plan_out.verify_prev_slot_indices,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        swa_window_size=swa_window_size,
        backend=backend,
    )

"""The plan's second half: the flat entries that a verify launch looks at."""

from __future__ import annotations

import torch

from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import plan as reference
from canary_kernels.validation import (
    fail,
    leading_size,
    require_device,
    require_dtype,
    require_length,
    require_rank,
)

_KERNEL = "plan_entries"


def validate_plan_entries(
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
    bs: int,
    verify_capacity: int,
) -> None:
    """Check the entries launcher's arguments in the contract's order.

    Raises:
        KernelArgumentError: kernel `plan_entries`.
    """
    if req_to_verify_expected_tokens is not None and req_to_verify_expected_tokens_valid_lens is None:
        fail(
            _KERNEL,
            "req_to_verify_expected_tokens_valid_lens",
            "required",
            "launch_plan_entries_kernel requires req_to_verify_expected_tokens_valid_lens when "
            "req_to_verify_expected_tokens is set",
        )
    # name, tensor, dtype, and its shape: a length, or None for a vector or "2-D" for a table of any size
    candidates: tuple[tuple[str, torch.Tensor | None, torch.dtype, int | str | None], ...] = (
        ("req_pool_indices", req_pool_indices, torch.int64, bs),
        ("prefix_lens", prefix_lens, torch.int64, bs),
        ("req_to_token", req_to_token, torch.int32, "2-D"),
        ("full_to_swa_index_mapping", full_to_swa_index_mapping, torch.int64, None),
        ("verify_offsets_scratch", verify_offsets_scratch, torch.int64, None),
        ("verify_enable", verify_enable, torch.int32, 1),
        ("req_to_verify_expected_tokens", req_to_verify_expected_tokens, torch.int32, "2-D"),
        ("req_to_verify_expected_tokens_valid_lens", req_to_verify_expected_tokens_valid_lens, torch.int64, bs),
        ("out_verify_slot_indices", out_verify_slot_indices, torch.int64, verify_capacity),
        ("out_verify_expected_tokens", out_verify_expected_tokens, torch.int64, verify_capacity),
        ("out_verify_expected_positions", out_verify_expected_positions, torch.int64, verify_capacity),
        ("out_verify_prev_slot_indices", out_verify_prev_slot_indices, torch.int64, verify_capacity),
    )
    named = [(name, tensor, dtype, shape) for name, tensor, dtype, shape in candidates if tensor is not None]
    for name, tensor, dtype, _ in named:
        require_dtype(_KERNEL, tensor, name, dtype)
    for name, tensor, _, shape in named:
        if isinstance(shape, int):
            require_length(_KERNEL, tensor, name, shape)
        else:
            require_rank(_KERNEL, tensor, name, 2 if shape == "2-D" else 1)
    require_device(
        _KERNEL, [(tensor, name) for name, tensor, _, _ in named], verify_offsets_scratch, "verify_offsets_scratch"
    )
    if verify_offsets_scratch.shape[0] < bs + 1:
        fail(_KERNEL, "verify_offsets_scratch", "length", "verify_offsets_scratch length must be >= bs_padded + 1")


def check_plan_entries(
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
) -> None:
    """All checks of the entries launcher, with the scalars derived from its tensors."""
    validate_plan_entries(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=verify_offsets_scratch,
        verify_enable=verify_enable,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        out_verify_slot_indices=out_verify_slot_indices,
        out_verify_expected_tokens=out_verify_expected_tokens,
        out_verify_expected_positions=out_verify_expected_positions,
        out_verify_prev_slot_indices=out_verify_prev_slot_indices,
        bs=leading_size(req_pool_indices),
        verify_capacity=leading_size(out_verify_slot_indices),
    )


def launch_plan_entries_kernel(
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
    backend: Backend | None = None,
) -> None:
    """Write one verify entry for each position of [window start, prefix) of each request.

    Nothing is written when the total is 0, `verify_enable` is 0, or the total exceeds the capacity. A negative raw slot
    passes through translation. What cannot be looked up (a row outside the table, a position beyond its width, a raw
    slot beyond the mapping) is 2^63 - 1; a mapped value is passed on, and the kernels that use it refuse it when it is
    beyond the pool.

    Args:
        req_pool_indices, prefix_lens: int64 [bs], as for `launch_plan_offsets_kernel`.
        req_to_token: int32 [max_reqs, max_len].
        full_to_swa_index_mapping: int64 [n] or None; translates slots and predecessors.
        verify_offsets_scratch: int64 [>= bs + 1], from `launch_plan_offsets_kernel`.
        verify_enable: int32 [1].
        req_to_verify_expected_tokens: int32 [max_reqs, ctx] or None; token ids by row and position + offset.
        req_to_verify_expected_tokens_valid_lens: int64 [bs]; ids of a request that count. Needed with the former.
        out_verify_slot_indices, out_verify_expected_tokens, out_verify_expected_positions,
            out_verify_prev_slot_indices: int64 [capacity]; entries past the total are left alone. An expected token is
            -1 where there is none; a predecessor is -1 at position 0.
        kv_token_id_vs_position_offset: token index minus position.
        swa_window_size: as for `launch_plan_offsets_kernel`.
        backend: see `resolve_backend`.

    Raises:
        KernelArgumentError: kernel `plan_entries`; nothing was written.
    """
    check_plan_entries(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=verify_offsets_scratch,
        verify_enable=verify_enable,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        out_verify_slot_indices=out_verify_slot_indices,
        out_verify_expected_tokens=out_verify_expected_tokens,
        out_verify_expected_positions=out_verify_expected_positions,
        out_verify_prev_slot_indices=out_verify_prev_slot_indices,
    )
    if resolve_backend(_KERNEL, backend, verify_offsets_scratch) == "triton":
        from canary_kernels.device import plan as device

        run = device.run_plan_entries
    else:
        run = reference.run_plan_entries
    with device_guard(verify_offsets_scratch):
        run(
            req_pool_indices=req_pool_indices,
            prefix_lens=prefix_lens,
            req_to_token=req_to_token,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            verify_offsets_scratch=verify_offsets_scratch,
            verify_enable=verify_enable,
            req_to_verify_expected_tokens=req_to_verify_expected_tokens,
            req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
            out_verify_slot_indices=out_verify_slot_indices,
            out_verify_expected_tokens=out_verify_expected_tokens,
            out_verify_expected_positions=out_verify_expected_positions,
            out_verify_prev_slot_indices=out_verify_prev_slot_indices,
            kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
            swa_window_size=swa_window_size,
        )
    record_launch(_KERNEL)

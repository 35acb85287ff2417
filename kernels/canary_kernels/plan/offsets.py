"""The plan's first half: how many entries each request has, and each request's seed slot."""

from __future__ import annotations

import torch

from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import plan as reference
from canary_kernels.validation import (
    fail,
    leading_size,
    require_contiguous,
    require_device,
    require_dtype,
    require_length,
    require_min_length,
    require_rank,
)

MAX_PLAN_REQUESTS = 4096
_KERNEL = "plan_offsets"


def validate_plan_offsets(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    lut_tensor: torch.Tensor,
    out_verify_offsets_scratch: torch.Tensor,
    out_write_offsets: torch.Tensor,
    out_write_seed_slot_indices: torch.Tensor,
    out_verify_num_valid: torch.Tensor,
    out_verify_enable: torch.Tensor,
    out_write_num_valid_reqs: torch.Tensor,
    bs: int,
    req_to_token_stride0: int,
    lut_len: int,
    has_swa_lut: bool,
    write_offsets_len: int,
    write_req_capacity: int,
    verify_capacity: int,
) -> None:
    """Check the offsets launcher's arguments in the contract's order.

    `lut_tensor` is the mapping, or any int64 vector when there is none (`has_swa_lut` False, `lut_len` 0).

    Raises:
        KernelArgumentError: kernel `plan_offsets`.
    """
    named = (
        (req_pool_indices, "req_pool_indices", torch.int64),
        (prefix_lens, "prefix_lens", torch.int64),
        (extend_seq_lens, "extend_seq_lens", torch.int64),
        (req_to_token, "req_to_token", torch.int32),
        (lut_tensor, "lut_tensor", torch.int64),
        (out_verify_offsets_scratch, "out_verify_offsets_scratch", torch.int64),
        (out_write_offsets, "out_write_offsets", torch.int64),
        (out_write_seed_slot_indices, "out_write_seed_slot_indices", torch.int64),
        (out_verify_num_valid, "out_verify_num_valid", torch.int32),
        (out_verify_enable, "out_verify_enable", torch.int32),
        (out_write_num_valid_reqs, "out_write_num_valid_reqs", torch.int32),
    )
    for tensor, name, _ in named:
        require_contiguous(_KERNEL, tensor, name)
    for tensor, name, dtype in named:
        require_dtype(_KERNEL, tensor, name, dtype)
    _validate_scalars(
        bs=bs,
        req_to_token_stride0=req_to_token_stride0,
        lut_len=lut_len,
        has_swa_lut=has_swa_lut,
        write_offsets_len=write_offsets_len,
        write_req_capacity=write_req_capacity,
        verify_capacity=verify_capacity,
    )

    require_length(_KERNEL, req_pool_indices, "req_pool_indices", bs)
    require_length(_KERNEL, prefix_lens, "prefix_lens", bs)
    require_length(_KERNEL, extend_seq_lens, "extend_seq_lens", bs)
    require_rank(_KERNEL, req_to_token, "req_to_token", 2)
    require_min_length(_KERNEL, lut_tensor, "lut_tensor", max(lut_len, 1))
    require_min_length(_KERNEL, out_verify_offsets_scratch, "out_verify_offsets_scratch", MAX_PLAN_REQUESTS + 1)
    require_length(_KERNEL, out_write_offsets, "out_write_offsets", write_offsets_len)
    require_length(_KERNEL, out_write_seed_slot_indices, "out_write_seed_slot_indices", write_req_capacity)
    require_length(_KERNEL, out_verify_num_valid, "out_verify_num_valid", 1)
    require_length(_KERNEL, out_verify_enable, "out_verify_enable", 1)
    require_length(_KERNEL, out_write_num_valid_reqs, "out_write_num_valid_reqs", 1)

    if write_offsets_len != write_req_capacity + 1:
        fail(
            _KERNEL,
            "write_offsets_len",
            "length",
            f"write_offsets_len must equal write_req_capacity + 1, got {write_offsets_len} and {write_req_capacity}",
        )
    if bs > write_req_capacity:
        fail(_KERNEL, "bs", "range", f"bs={bs} exceeds write_req_capacity={write_req_capacity}")
    if req_to_token_stride0 != req_to_token.stride(0):
        fail(
            _KERNEL,
            "req_to_token_stride0",
            "consistency",
            f"req_to_token_stride0={req_to_token_stride0} does not match "
            f"req_to_token.stride(0)={req_to_token.stride(0)}",
        )

    others = [(tensor, name) for tensor, name, _ in named if name != "out_verify_offsets_scratch"]
    require_device(_KERNEL, others, out_verify_offsets_scratch, "out_verify_offsets_scratch")


def _validate_scalars(
    *,
    bs: int,
    req_to_token_stride0: int,
    lut_len: int,
    has_swa_lut: bool,
    write_offsets_len: int,
    write_req_capacity: int,
    verify_capacity: int,
) -> None:
    if not 0 <= bs <= MAX_PLAN_REQUESTS:
        fail(_KERNEL, "bs", "range", f"offsets kernel bs must be in [0, {MAX_PLAN_REQUESTS}], got {bs}")
    if write_offsets_len <= 0:
        fail(_KERNEL, "write_offsets_len", "range", f"write_offsets_len must be positive, got {write_offsets_len}")
    if write_req_capacity < 0:
        fail(
            _KERNEL, "write_req_capacity", "range", f"write_req_capacity must be non-negative, got {write_req_capacity}"
        )
    if verify_capacity < 0:
        fail(_KERNEL, "verify_capacity", "range", f"verify_capacity must be non-negative, got {verify_capacity}")
    if req_to_token_stride0 <= 0:
        fail(
            _KERNEL,
            "req_to_token_stride0",
            "range",
            f"req_to_token_stride0 must be positive, got {req_to_token_stride0}",
        )
    if lut_len < 0:
        fail(_KERNEL, "lut_len", "range", f"lut_len must be non-negative, got {lut_len}")
    if not isinstance(has_swa_lut, bool):
        fail(_KERNEL, "has_swa_lut", "type", f"has_swa_lut must be bool, got {type(has_swa_lut).__name__}")
    if has_swa_lut and lut_len <= 0:
        fail(_KERNEL, "lut_len", "consistency", "lut_len must be positive when has_swa_lut is True")
    if not has_swa_lut and lut_len != 0:
        fail(_KERNEL, "lut_len", "consistency", "lut_len must be 0 when has_swa_lut is False")


def check_plan_offsets(
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
    verify_capacity: int,
) -> None:
    """All checks of the offsets launcher, with the scalars derived from its tensors."""
    has_swa_lut = full_to_swa_index_mapping is not None
    validate_plan_offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        lut_tensor=(
            torch.empty(1, dtype=torch.int64, device=out_verify_offsets_scratch.device)
            if full_to_swa_index_mapping is None
            else full_to_swa_index_mapping
        ),
        out_verify_offsets_scratch=out_verify_offsets_scratch,
        out_write_offsets=out_write_offsets,
        out_write_seed_slot_indices=out_write_seed_slot_indices,
        out_verify_num_valid=out_verify_num_valid,
        out_verify_enable=out_verify_enable,
        out_write_num_valid_reqs=out_write_num_valid_reqs,
        bs=leading_size(req_pool_indices),
        req_to_token_stride0=req_to_token.stride(0) if req_to_token.dim() else 1,
        lut_len=0 if full_to_swa_index_mapping is None else leading_size(full_to_swa_index_mapping),
        has_swa_lut=has_swa_lut,
        write_offsets_len=leading_size(out_write_offsets),
        write_req_capacity=leading_size(out_write_seed_slot_indices),
        verify_capacity=verify_capacity,
    )


def launch_plan_offsets_kernel(
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
    backend: Backend | None = None,
) -> None:
    """Count each request's verify entries and written tokens, sum them up, and look up seed slots.

    A request is active when its pool index is not 0; lengths are clamped to [0, 2^31 - 1]. An active request verifies
    the positions [max(0, prefix - window), prefix) (from 0 when the window is not positive) and writes `extend` tokens.

    Args:
        req_pool_indices, prefix_lens, extend_seq_lens: int64 [bs], bs <= 4096.
        req_to_token: int32 [max_reqs, max_len], slots of each request by position.
        full_to_swa_index_mapping: int64 [n] or None; translates the seed slots.
        out_verify_offsets_scratch: int64 [>= 4097]; [0, bs] receive the exclusive sums, [bs] the total.
        out_write_offsets: int64 [capacity + 1]; [0, bs] are written, the rest is left alone.
        out_write_seed_slot_indices: int64 [capacity]; the slot at prefix - 1 if prefix > 0 and tokens are written, else
            -1; 2^63 - 1 if it cannot be looked up. Those past bs are left alone.
        out_verify_num_valid: int32 [1], min(total, verify_capacity).
        out_verify_enable: int32 [1], 0 exactly when total > verify_capacity.
        out_write_num_valid_reqs: int32 [1], bs, padding included.
        swa_window_size: positions that are verified before the prefix's end; not positive for all.
        verify_capacity: entries that the verify plan holds.
        backend: see `resolve_backend`.

    Raises:
        KernelArgumentError: kernel `plan_offsets`; nothing was written.
    """
    check_plan_offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        out_verify_offsets_scratch=out_verify_offsets_scratch,
        out_write_offsets=out_write_offsets,
        out_write_seed_slot_indices=out_write_seed_slot_indices,
        out_verify_num_valid=out_verify_num_valid,
        out_verify_enable=out_verify_enable,
        out_write_num_valid_reqs=out_write_num_valid_reqs,
        verify_capacity=verify_capacity,
    )
    if resolve_backend(_KERNEL, backend, out_verify_offsets_scratch) == "triton":
        from canary_kernels.device import plan as device

        run = device.run_plan_offsets
    else:
        run = reference.run_plan_offsets
    with device_guard(out_verify_offsets_scratch):
        run(
            req_pool_indices=req_pool_indices,
            prefix_lens=prefix_lens,
            extend_seq_lens=extend_seq_lens,
            req_to_token=req_to_token,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            out_verify_offsets_scratch=out_verify_offsets_scratch,
            out_write_offsets=out_write_offsets,
            out_write_seed_slot_indices=out_write_seed_slot_indices,
            out_verify_num_valid=out_verify_num_valid,
            out_verify_enable=out_verify_enable,
            out_write_num_valid_reqs=out_write_num_valid_reqs,
            swa_window_size=swa_window_size,
            verify_capacity=verify_capacity,
        )
    record_launch(_KERNEL)

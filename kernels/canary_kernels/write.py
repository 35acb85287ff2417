"""Write: store the records of the tokens that a step wrote, each chained to the one before."""

from __future__ import annotations

import torch

from canary_kernels.context import VerifyOrWriteContext, WritePlan
from canary_kernels.context_checks import (
    Named,
    check_sinks_contiguous,
    check_slot_stride,
    check_source_count,
    check_sources_packed,
    check_tensors,
)
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import write as reference
from canary_kernels.validation import fail, leading_size, require_contiguous

_KERNEL = "canary_write"


def validate_canary_write(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
    num_sources: int,
    num_tokens: int,
    write_offsets_len: int,
    write_req_capacity: int,
    slot_stride_bytes: int,
) -> None:
    """Check the write launcher's arguments in the contract's order.

    Raises:
        KernelArgumentError: kernel `canary_write`.
    """
    check_source_count(_KERNEL, num_sources)
    require_contiguous(_KERNEL, context.canary_buf, "canary_buf")
    require_contiguous(_KERNEL, plan.write_offsets, "plan.write_offsets")
    require_contiguous(_KERNEL, plan.write_seed_slot_indices, "plan.write_seed_slot_indices")
    require_contiguous(_KERNEL, plan.write_num_valid_reqs, "plan.write_num_valid_reqs")
    require_contiguous(_KERNEL, input_ids, "input_ids")
    require_contiguous(_KERNEL, positions, "positions")
    require_contiguous(_KERNEL, out_cache_loc, "out_cache_loc")
    expected = _check_expected_inputs(
        enable_write_input_assert, expected_input_tokens, expected_input_positions, num_tokens
    )
    check_sinks_contiguous(_KERNEL, context)
    require_contiguous(_KERNEL, context.enable_chain_position_assert, "enable_chain_position_assert")
    check_sources_packed(_KERNEL, context.real_kv_sources)
    check_tensors(
        _KERNEL,
        [
            (context.canary_buf, "canary_buf", torch.uint8, "2-D"),
            (plan.write_offsets, "plan.write_offsets", torch.int64, None),
            (plan.write_seed_slot_indices, "plan.write_seed_slot_indices", torch.int64, None),
            (plan.write_num_valid_reqs, "plan.write_num_valid_reqs", torch.int32, 1),
            (input_ids, "input_ids", torch.int64, num_tokens),
            (positions, "positions", torch.int64, num_tokens),
            (out_cache_loc, "out_cache_loc", torch.int64, num_tokens),
            *expected,
            (context.violation_write_index, "violation_write_index", torch.int32, 1),
            (context.violation_ring, "violation_ring", torch.int64, "ring"),
            (context.slot_run_counter, "slot_run_counter", torch.int64, 1),
            (context.kernel_run_counter, "kernel_run_counter", torch.int64, 1),
            (context.enable_chain_position_assert, "enable_chain_position_assert", torch.int32, 1),
        ],
        context.real_kv_sources,
    )
    if write_offsets_len != write_req_capacity + 1:
        fail(
            _KERNEL,
            "write_offsets",
            "length",
            "canary_write: write_offsets.size(0) must equal write_req_capacity + 1 "
            f"({write_req_capacity + 1}), got {write_offsets_len}",
        )
    check_slot_stride(_KERNEL, slot_stride_bytes)


def _check_expected_inputs(
    enabled: bool, tokens: torch.Tensor | None, positions: torch.Tensor | None, num_tokens: int
) -> list[Named]:
    if not enabled:
        if tokens is not None or positions is not None:
            fail(
                _KERNEL,
                "expected_input_positions" if tokens is None else "expected_input_tokens",
                "forbidden",
                "expected input tensors must be None when enable_write_input_assert=False",
            )
        return []
    if tokens is None or positions is None:
        fail(
            _KERNEL,
            "expected_input_tokens" if tokens is None else "expected_input_positions",
            "required",
            "expected input tensors are required when enable_write_input_assert=True",
        )
    require_contiguous(_KERNEL, tokens, "expected_input_tokens")
    require_contiguous(_KERNEL, positions, "expected_input_positions")
    return [
        (tokens, "expected_input_tokens", torch.int64, num_tokens),
        (positions, "expected_input_positions", torch.int64, num_tokens),
    ]


def launch_canary_write_kernel(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
    backend: Backend | None = None,
) -> None:
    """Store token, position, running chain hash and real-KV hash of each token of each valid request.

    A request's chain goes on from its seed slot's record (all seeds are read before any store), or starts at the anchor
    when the seed is negative. A negative slot is skipped: no store, no count, no step of the chain. Of two writers of a
    slot the later token wins, with its whole record. Nothing out of range is read or written: a slot beyond the buffer
    or a hashed source is skipped with a row of bit 64; a seed beyond the buffer starts at the anchor, unchecked, with a
    row; a request whose offsets decrease or leave the tokens is skipped with one row of slot -1.

    Rows: kind, slot, position, token, expected token, running hash, expected position, bits 8 (token) and 16 (position)
    for an input mismatch; and, when the chain's positions are checked, expected token = token, expected position =
    previous + 1, bit 16. In rows of bit 64 what is not known is 0, the expected token -1.

    Args:
        context: buffer, sinks and sources, see `VerifyOrWriteContext`.
        plan: see `WritePlan`; `write_num_valid_reqs` is clamped to [0, capacity].
        input_ids, positions, out_cache_loc: int64 [num_tokens]; token, position and slot of each.
        enable_write_input_assert: compare with the two expected tensors.
        expected_input_tokens, expected_input_positions: int64 [num_tokens] if enabled, else None.
        backend: see `resolve_backend`.

    Raises:
        KernelArgumentError: kernel `canary_write`; nothing was written.
    """
    buffer = context.canary_buf
    validate_canary_write(
        context=context,
        plan=plan,
        input_ids=input_ids,
        positions=positions,
        out_cache_loc=out_cache_loc,
        enable_write_input_assert=enable_write_input_assert,
        expected_input_tokens=expected_input_tokens,
        expected_input_positions=expected_input_positions,
        num_sources=len(context.real_kv_sources),
        num_tokens=leading_size(input_ids),
        write_offsets_len=leading_size(plan.write_offsets),
        write_req_capacity=leading_size(plan.write_seed_slot_indices),
        slot_stride_bytes=buffer.shape[1] if buffer.dim() == 2 else 0,
    )
    if resolve_backend(_KERNEL, backend, buffer) == "triton":
        from canary_kernels.device import write as device

        run = device.run_canary_write
    else:
        run = reference.run_canary_write
    with device_guard(buffer):
        run(
            context=context,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            expected_input_tokens=expected_input_tokens,
            expected_input_positions=expected_input_positions,
        )
    record_launch(_KERNEL)

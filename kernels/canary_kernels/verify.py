"""Verify: compare slot records with a plan's expectations, with their predecessors and with the real KV bytes."""

from __future__ import annotations

import torch

from canary_kernels.context import VerifyOrWriteContext, VerifyPlan
from canary_kernels.context_checks import (
    check_sinks_contiguous,
    check_slot_stride,
    check_source_count,
    check_sources_packed,
    check_tensors,
)
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import verify as reference
from canary_kernels.validation import leading_size, require_contiguous

_KERNEL = "canary_verify"


def validate_canary_verify(
    *, context: VerifyOrWriteContext, plan: VerifyPlan, num_sources: int, slot_stride_bytes: int
) -> None:
    """Check the verify launcher's arguments in the contract's order.

    Raises:
        KernelArgumentError: kernel `canary_verify`.
    """
    check_source_count(_KERNEL, num_sources)
    require_contiguous(_KERNEL, context.canary_buf, "canary_buf")
    require_contiguous(_KERNEL, plan.verify_slot_indices, "plan.verify_slot_indices")
    require_contiguous(_KERNEL, plan.verify_expected_tokens, "plan.verify_expected_tokens")
    require_contiguous(_KERNEL, plan.verify_expected_positions, "plan.verify_expected_positions")
    require_contiguous(_KERNEL, plan.verify_prev_slot_indices, "plan.verify_prev_slot_indices")
    require_contiguous(_KERNEL, plan.verify_num_valid, "plan.verify_num_valid")
    require_contiguous(_KERNEL, plan.enable, "plan.enable")
    check_sinks_contiguous(_KERNEL, context)
    check_sources_packed(_KERNEL, context.real_kv_sources)
    capacity = leading_size(plan.verify_slot_indices)
    check_tensors(
        _KERNEL,
        [
            (context.canary_buf, "canary_buf", torch.uint8, "2-D"),
            (plan.verify_slot_indices, "plan.verify_slot_indices", torch.int64, capacity),
            (plan.verify_expected_tokens, "plan.verify_expected_tokens", torch.int64, capacity),
            (plan.verify_expected_positions, "plan.verify_expected_positions", torch.int64, capacity),
            (plan.verify_prev_slot_indices, "plan.verify_prev_slot_indices", torch.int64, capacity),
            (plan.verify_num_valid, "plan.verify_num_valid", torch.int32, 1),
            (plan.enable, "plan.enable", torch.int32, 1),
            (context.violation_write_index, "violation_write_index", torch.int32, 1),
            (context.violation_ring, "violation_ring", torch.int64, "ring"),
            (context.slot_run_counter, "slot_run_counter", torch.int64, 1),
            (context.kernel_run_counter, "kernel_run_counter", torch.int64, 1),
        ],
        context.real_kv_sources,
    )
    check_slot_stride(_KERNEL, slot_stride_bytes)


def launch_canary_verify_kernel(
    *,
    context: VerifyOrWriteContext,
    plan: VerifyPlan,
    check_verify_expected_token: bool,
    backend: Backend | None = None,
) -> None:
    """Check each valid entry of a plan and record one violation row per entry that fails, its bits combined.

    The launch is counted even when the plan is disabled. Slot 0 is padding: counted and skipped. The chain hash is
    compared with `mix3` of the predecessor's record (the anchor for a predecessor < 0, nothing for predecessor 0);
    position and real-KV hash always; the token if asked and the expected one is not -1. A slot outside the buffer, or
    beyond a hashed source, is never read and fails with bit 64 alone; a predecessor beyond the buffer adds bit 64.

    Row: kind, slot, stored position, stored token, expected token or -1, stored chain hash, expected chain hash, bits.

    Args:
        context: buffer, sinks and sources, see `VerifyOrWriteContext`.
        plan: entries, see `VerifyPlan`; `verify_num_valid` is clamped to [0, capacity].
        check_verify_expected_token: compare tokens too.
        backend: see `resolve_backend`.

    Raises:
        KernelArgumentError: kernel `canary_verify`; nothing was written.
    """
    buffer = context.canary_buf
    validate_canary_verify(
        context=context,
        plan=plan,
        num_sources=len(context.real_kv_sources),
        slot_stride_bytes=buffer.shape[1] if buffer.dim() == 2 else 0,
    )
    if resolve_backend(_KERNEL, backend, buffer) == "triton":
        from canary_kernels.device import verify as device

        run = device.run_canary_verify
    else:
        run = reference.run_canary_verify
    with device_guard(buffer):
        run(context=context, plan=plan, check_verify_expected_token=check_verify_expected_token)
    record_launch(_KERNEL)

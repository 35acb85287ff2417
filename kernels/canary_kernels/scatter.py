"""Scatter: put each request's flat token ids into its row of a pool."""

from __future__ import annotations

import torch

from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import scatter as reference
from canary_kernels.validation import KernelArgumentTypeError, fail, leading_size, report, require_device

_KERNEL = "scatter"


def validate_scatter(
    *,
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    pool_out: torch.Tensor,
    bs: int,
) -> None:
    """Check the scatter launcher's arguments in the contract's order.

    Raises:
        KernelArgumentError: kernel `scatter`; for a wrong dtype also a TypeError.
    """
    named = (
        (flat_in, "flat_in", 1, torch.int64),
        (offsets, "offsets", 1, torch.int64),
        (req_pool_indices, "req_pool_indices", 1, torch.int64),
        (pool_out, "pool_out", 2, torch.int32),
    )
    for tensor, name, rank, _ in named:
        if tensor.dim() != rank:
            fail(
                _KERNEL,
                name,
                "shape",
                f"scatter_req_token_ids {name} must be {rank}-D, got shape {tuple(tensor.shape)}",
            )
    for tensor, name, _, dtype in named:
        if tensor.dtype != dtype:
            short = str(dtype).removeprefix("torch.")
            message = f"scatter_req_token_ids {name} must be {short}, got {tensor.dtype}"
            report(KernelArgumentTypeError(message, kernel=_KERNEL, argument=name, check="dtype"))
    if offsets.shape[0] != bs + 1:
        fail(
            _KERNEL,
            "offsets",
            "length",
            f"scatter_req_token_ids offsets length {offsets.shape[0]} != bs+1 ({bs + 1})",
        )
    require_device(_KERNEL, [(tensor, name) for tensor, name, _, _ in named], flat_in, "flat_in")


def launch_scatter_req_token_ids_kernel(
    *,
    flat_in: torch.Tensor,
    offsets: torch.Tensor,
    req_pool_indices: torch.Tensor,
    pool_out: torch.Tensor,
    backend: Backend | None = None,
) -> None:
    """Write the token ids of each request to its row from column 0, cut at the row's width.

    Request r owns the tokens [offsets[r], offsets[r + 1]). Rows outside the pool, and tokens outside
    [offsets[0], offsets[bs]), are skipped.

    Args:
        flat_in: int64 [num_tokens]; ids are narrowed to int32.
        offsets: int64 [bs + 1], not decreasing.
        req_pool_indices: int64 [bs], row of each request; distinct (of two requests with one row, one id wins).
        pool_out: int32 [max_reqs, width], changed in place.
        backend: see `resolve_backend`.

    Raises:
        KernelArgumentError: kernel `scatter`; nothing was written. A wrong dtype is also a TypeError.
    """
    validate_scatter(
        flat_in=flat_in,
        offsets=offsets,
        req_pool_indices=req_pool_indices,
        pool_out=pool_out,
        bs=leading_size(req_pool_indices),
    )
    if resolve_backend(_KERNEL, backend, pool_out) == "triton":
        from canary_kernels.device import scatter as device

        run = device.run_scatter
    else:
        run = reference.run_scatter
    with device_guard(pool_out):
        run(flat_in=flat_in, offsets=offsets, req_pool_indices=req_pool_indices, pool_out=pool_out)
    record_launch(_KERNEL)

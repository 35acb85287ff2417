"""Argument checks of the launchers: one error type, closed label sets, and a hook that reports each failure.

The checks of a launcher run in a fixed order, on every backend, before anything is written. Validators take derived
scalars explicitly, so that each text can be tested although a launcher derives the scalar itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

KERNELS = frozenset(
    {
        # containers
        "real_kv_source",
        "verify_plan",
        "write_plan",
        # launchers of the contract
        "plan",
        "plan_offsets",
        "plan_entries",
        "canary_verify",
        "canary_write",
        "scatter",
        # the native fingerprint
        "items",
        "digest",
        "stamp",
        "compare",
        "notes",
        "links",
    }
)
"""Legal values of `KernelArgumentError.kernel`."""

ARGUMENTS = frozenset(
    {
        "backend",
        "bs",
        "canary_buf",
        "enable",
        "enable_chain_position_assert",
        "expected_input_positions",
        "expected_input_tokens",
        "extend_seq_lens",
        "flat_in",
        "full_to_swa_index_mapping",
        "has_swa_lut",
        "input_ids",
        "kernel_run_counter",
        "lut_len",
        "lut_tensor",
        "num_bytes_per_token",
        "offsets",
        "out_cache_loc",
        "out_verify_enable",
        "out_verify_expected_positions",
        "out_verify_expected_tokens",
        "out_verify_num_valid",
        "out_verify_offsets_scratch",
        "out_verify_prev_slot_indices",
        "out_verify_slot_indices",
        "out_write_num_valid_reqs",
        "out_write_offsets",
        "out_write_seed_slot_indices",
        "page_size",
        "pool_out",
        "positions",
        "prefix_lens",
        "read_bytes",
        "real_kv_sources",
        "req_pool_indices",
        "req_to_token",
        "req_to_token_stride0",
        "req_to_verify_expected_tokens",
        "req_to_verify_expected_tokens_valid_lens",
        "slot_run_counter",
        "slot_stride_bytes",
        "tensor",
        "verify_capacity",
        "verify_enable",
        "verify_expected_positions",
        "verify_expected_tokens",
        "verify_num_valid",
        "verify_offsets_scratch",
        "verify_prev_slot_indices",
        "verify_slot_indices",
        "violation_ring",
        "violation_write_index",
        "write_num_valid_reqs",
        "write_offsets",
        "write_offsets_len",
        "write_req_capacity",
        "write_seed_slot_indices",
        # the native fingerprint
        "count",
        "digests",
        "digests_out",
        "first_offsets",
        "first_positions",
        "first_prev_slots",
        "generations",
        "heads",
        "item_offsets",
        "layout",
        "nonfinite",
        "nonfinite_out",
        "page_offsets",
        "pages",
        "prev_slots",
        "records",
        "region_bytes_out",
        "rows",
        "run_numbers",
        "seeds",
        "slots",
        "sums",
        "sums_out",
        "tokens",
    }
)
"""Legal values of `KernelArgumentError.argument`."""

CHECKS = frozenset(
    {
        "alignment",
        "consistency",
        "contiguous",
        "count",
        "device",
        "dtype",
        "forbidden",
        "length",
        "range",
        "required",
        "shape",
        "stride",
        "type",
    }
)
"""Legal values of `KernelArgumentError.check`."""

_DECORATION = re.compile(r"^(?:plan\.)|(?:\[\d+\])|(?:\.tensor$)|(?: row$)")


class KernelArgumentError(ValueError):
    """A launcher or container refused an argument; nothing was written.

    Args:
        message: the text after `kv-canary: `.
        kernel: which launcher or container, one of `KERNELS`.
        argument: which argument, one of `ARGUMENTS`.
        check: what was checked, one of `CHECKS`.
    """

    def __init__(self, message: str, *, kernel: str, argument: str, check: str) -> None:
        if kernel not in KERNELS or argument not in ARGUMENTS or check not in CHECKS:
            raise AssertionError(f"label outside the closed lists: {kernel}, {argument}, {check}")
        super().__init__(f"kv-canary: {message}")
        self.kernel = kernel
        self.argument = argument
        self.check = check


class KernelArgumentTypeError(KernelArgumentError, TypeError):
    """A `KernelArgumentError` that is also a `TypeError`: the scatter launcher's dtype checks."""


_observer: Callable[[KernelArgumentError], None] | None = None


def set_validation_observer(observer: Callable[[KernelArgumentError], None] | None) -> None:
    """Have `observer(error)` called for each failed check, just before it is raised; None removes it."""
    global _observer  # noqa: PLW0603 - one hook per process, like the launch observer
    _observer = observer


def report(error: KernelArgumentError) -> NoReturn:
    """Tell the observer of `error`, then raise it."""
    if _observer is not None:
        _observer(error)
    raise error


def fail(kernel: str, argument: str, check: str, message: str) -> NoReturn:
    """Report and raise a `KernelArgumentError` with the text `kv-canary: {message}`."""
    report(KernelArgumentError(message, kernel=kernel, argument=argument, check=check))


def argument_label(name: str) -> str:
    """The label of an argument that texts call `name`: `plan.x` is `x`, `real_kv_sources[1].tensor` is
    `real_kv_sources`."""
    return _DECORATION.sub("", name)


def require_contiguous(kernel: str, tensor: torch.Tensor, name: str) -> None:
    """`{name} must be contiguous`."""
    if not tensor.is_contiguous():
        fail(kernel, argument_label(name), "contiguous", f"{name} must be contiguous")


def require_dtype(kernel: str, tensor: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """`{name} must have dtype {dtype}, got {...}`."""
    if tensor.dtype != dtype:
        fail(kernel, argument_label(name), "dtype", f"{name} must have dtype {dtype}, got {tensor.dtype}")


def require_rank(kernel: str, tensor: torch.Tensor, name: str, rank: int) -> None:
    """`{name} must be {rank}-D, got shape {...}`."""
    if tensor.dim() != rank:
        fail(kernel, argument_label(name), "shape", f"{name} must be {rank}-D, got shape {tuple(tensor.shape)}")


def require_length(kernel: str, tensor: torch.Tensor, name: str, length: int) -> None:
    """1-D, and `{name} length must be {length}, got {...}`."""
    require_rank(kernel, tensor, name, 1)
    actual = tensor.shape[0]
    if actual != length:
        fail(kernel, argument_label(name), "length", f"{name} length must be {length}, got {actual}")


def require_min_length(kernel: str, tensor: torch.Tensor, name: str, minimum: int) -> None:
    """1-D, and `{name} length must be >= {minimum}, got {...}`."""
    require_rank(kernel, tensor, name, 1)
    actual = tensor.shape[0]
    if actual < minimum:
        fail(kernel, argument_label(name), "length", f"{name} length must be >= {minimum}, got {actual}")


def require_device(
    kernel: str, tensors: Iterable[tuple[torch.Tensor, str]], reference: torch.Tensor, reference_name: str
) -> None:
    """`{name} must be on {reference_name}'s device {...}, got {...}`, for each tensor in order."""
    for tensor, name in tensors:
        if tensor.device != reference.device:
            fail(
                kernel,
                argument_label(name),
                "device",
                f"{name} must be on {reference_name}'s device {reference.device}, got {tensor.device}",
            )


def leading_size(tensor: torch.Tensor) -> int:
    """`shape[0]`, or 0 for a 0-D tensor (whose rank a later check refuses)."""
    return tensor.shape[0] if tensor.dim() else 0

"""Checks that the verify and the write launcher share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from canary_kernels.context import (
    MAX_REAL_KV_SOURCES,
    SLOT_FIELD_BYTES,
    VIOLATION_FIELDS,
    RealKvSource,
    VerifyOrWriteContext,
)
from canary_kernels.validation import (
    fail,
    require_contiguous,
    require_device,
    require_dtype,
    require_length,
    require_rank,
)

Shape = int | str | None
"""What a tensor's shape must be: a length, None for a vector of any length, "2-D" or "ring"."""
Named = tuple[torch.Tensor, str, torch.dtype, Shape]


def check_source_count(kernel: str, count: int) -> None:
    """At most four sources."""
    if count > MAX_REAL_KV_SOURCES:
        fail(
            kernel,
            "real_kv_sources",
            "count",
            f"at most {MAX_REAL_KV_SOURCES} RealKvSource entries supported by the CUDA ABI, got {count}",
        )


def check_sinks_contiguous(kernel: str, context: VerifyOrWriteContext) -> None:
    """Ring, write index and both counters are contiguous."""
    require_contiguous(kernel, context.violation_ring, "violation_ring")
    require_contiguous(kernel, context.violation_write_index, "violation_write_index")
    require_contiguous(kernel, context.slot_run_counter, "slot_run_counter")
    require_contiguous(kernel, context.kernel_run_counter, "kernel_run_counter")


def check_sources_packed(kernel: str, sources: Sequence[RealKvSource]) -> None:
    """Each source's rows are packed and, as bytes, a 2-D tensor."""
    for number, source in enumerate(sources):
        tensor = source.tensor
        if tensor.stride(-1) != 1:
            fail(
                kernel,
                "real_kv_sources",
                "stride",
                f"real_kv_sources[{number}].tensor rows must be packed (stride(-1) == 1), got strides "
                f"{tuple(tensor.stride())}",
            )
        if tensor.dim() != 2:
            fail(
                kernel,
                "real_kv_sources",
                "shape",
                f"real_kv_sources[{number}].tensor (viewed as uint8) must be 2-D, got {tensor.dim()}-D",
            )


def check_tensors(kernel: str, named: Sequence[Named], sources: Sequence[RealKvSource]) -> None:
    """Dtypes, then shapes, then devices, each in the order of `named`; sources last. The first is `canary_buf`."""
    for tensor, name, dtype, _ in named:
        require_dtype(kernel, tensor, name, dtype)
    for tensor, name, _, shape in named:
        if isinstance(shape, int):
            require_length(kernel, tensor, name, shape)
        elif shape is None:
            require_rank(kernel, tensor, name, 1)
        else:
            require_rank(kernel, tensor, name, 2)
            if shape == "ring" and tensor.shape[1] != VIOLATION_FIELDS:
                fail(
                    kernel,
                    name,
                    "length",
                    f"{name} row length must be {VIOLATION_FIELDS}, got {tensor.shape[1]}",
                )
    placed = [(tensor, name) for tensor, name, _, _ in named]
    placed += [(source.tensor, f"real_kv_sources[{number}].tensor") for number, source in enumerate(sources)]
    require_device(kernel, placed, named[0][0], "canary_buf")


def check_slot_stride(kernel: str, slot_stride_bytes: int) -> None:
    """A slot's record fits its stride."""
    if slot_stride_bytes < SLOT_FIELD_BYTES:
        fail(
            kernel,
            "slot_stride_bytes",
            "range",
            f"{kernel}: slot_stride_bytes must hold at least {SLOT_FIELD_BYTES} bytes per slot, "
            f"got {slot_stride_bytes}",
        )

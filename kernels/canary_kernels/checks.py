"""Argument checks that the launchers of the daemon's own path share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from canary_kernels.findings import Findings
from canary_kernels.records import FIELDS
from canary_kernels.validation import (
    fail,
    require_contiguous,
    require_device,
    require_dtype,
    require_length,
    require_rank,
)


def check_vectors(
    kernel: str, first: torch.Tensor, first_name: str, vectors: Mapping[str, tuple[torch.Tensor, int | None]]
) -> None:
    """Each tensor must be a contiguous int64 vector of the given length (None: any), on `first`'s device."""
    for name, (tensor, length) in vectors.items():
        require_contiguous(kernel, tensor, name)
        require_dtype(kernel, tensor, name, torch.int64)
        if length is None:
            require_rank(kernel, tensor, name, 1)
        else:
            require_length(kernel, tensor, name, length)
    require_device(kernel, [(tensor, name) for name, (tensor, _) in vectors.items()], first, first_name)


def check_records(kernel: str, records: torch.Tensor) -> None:
    """Records must be a contiguous int64 [num_slots, 8] tensor."""
    check_table(kernel, "records", records, FIELDS, torch.int64)


def check_findings(kernel: str, findings: Findings, width: int, records: torch.Tensor) -> None:
    """Rows must be int64 [capacity, width], the count int64 [1], both on the records' device."""
    check_table(kernel, "rows", findings.rows, width, torch.int64)
    check_vectors(kernel, records, "records", {"count": (findings.count, 1)})
    require_device(kernel, [(findings.rows, "rows")], records, "records")


def check_table(kernel: str, name: str, tensor: torch.Tensor, width: int, dtype: torch.dtype) -> None:
    """The tensor must be contiguous, of `dtype`, with shape [any, width]."""
    require_contiguous(kernel, tensor, name)
    require_dtype(kernel, tensor, name, dtype)
    require_rank(kernel, tensor, name, 2)
    if tensor.shape[1] != width:
        fail(kernel, name, "shape", f"{name} must have {width} columns, got shape {tuple(tensor.shape)}")

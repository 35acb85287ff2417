"""The compare kernel: records against freshly read digests and sums."""

from __future__ import annotations

import torch

from canary_kernels.checks import check_findings, check_records, check_vectors
from canary_kernels.findings import Findings
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import compare as reference

COMPARE_FIELDS = 5
"""Columns of a compare row: item, stored digest, seen digest, stored sum, seen sum."""


def launch_compare(
    *,
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    out: Findings,
    item_base: int = 0,
    backend: Backend | None = None,
) -> None:
    """Appends one row to `out` (width 5) per item whose digest or sum is not the recorded one.

    records int64 [num_slots, 8]; slots, digests, sums int64 [n]; `item_base` is added to the item numbers. An item
    whose record was never stamped, or whose slot is out of range (stored fields 0), is a row too: nothing counts as
    equal that could not be compared.

    Raises:
        KernelArgumentError: an argument has a wrong dtype, shape or device.
    """
    n = slots.numel()
    check_records("compare", records)
    check_vectors("compare", records, "records", {"slots": (slots, n), "digests": (digests, n), "sums": (sums, n)})
    check_findings("compare", out, COMPARE_FIELDS, records)
    if n == 0:
        return
    if resolve_backend("compare", backend, records) == "triton":
        import canary_kernels.device.compare as kernels

        with device_guard(records):
            kernels.compare(records, slots, digests, sums, out, item_base=item_base)
    else:
        reference.compare(records, slots, digests, sums, out, item_base=item_base)
    record_launch("compare")

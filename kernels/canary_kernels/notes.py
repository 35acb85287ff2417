"""The notes kernel: what the records and the bytes read say of slots that are about to be stamped."""

from __future__ import annotations

import torch

from canary_kernels.checks import check_findings, check_records, check_vectors
from canary_kernels.findings import Findings
from canary_kernels.launches import Backend, device_guard, resolve_backend
from canary_kernels.reference import notes as reference
from canary_kernels.validation import require_contiguous, require_device, require_dtype, require_length

NOTE_FIELDS = 2
"""Columns of a note: item, bits."""


def launch_notes(
    *,
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    nonfinite: torch.Tensor,
    out: Findings,
    backend: Backend | None = None,
) -> None:
    """Appends one row to `out` (width 2) per item of which there is something to say.

    records int64 [num_slots, 8]; slots, digests, sums int64 [n]; nonfinite uint8 [n], 1 where the slot holds NaN or
    infinity. Bits: `NOTE_UNCHANGED`, the record was stamped and holds the same digest and sum already;
    `NOTE_NONFINITE`. A slot out of range has neither.

    Raises:
        KernelArgumentError: an argument has a wrong dtype, shape or device.
    """
    n = slots.numel()
    check_records("notes", records)
    check_vectors("notes", records, "records", {"slots": (slots, n), "digests": (digests, n), "sums": (sums, n)})
    require_contiguous("notes", nonfinite, "nonfinite")
    require_dtype("notes", nonfinite, "nonfinite", torch.uint8)
    require_length("notes", nonfinite, "nonfinite", n)
    require_device("notes", [(nonfinite, "nonfinite")], records, "records")
    check_findings("notes", out, NOTE_FIELDS, records)
    if n == 0:
        return
    if resolve_backend("notes", backend, records) == "triton":
        import canary_kernels.device.notes as kernels

        with device_guard(records):
            kernels.notes(records, slots, digests, sums, nonfinite, out)
    else:
        reference.notes(records, slots, digests, sums, nonfinite, out)

"""Notes of slots that are about to be stamped, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from canary_kernels import records as fields
from canary_kernels.constants import NOTE_NONFINITE, NOTE_UNCHANGED

if TYPE_CHECKING:
    from canary_kernels.findings import Findings


def notes(  # noqa: PLR0917 - records, what was read, result
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    nonfinite: torch.Tensor,
    out: Findings,
) -> None:
    """Appends the notes of `canary_kernels.notes.launch_notes`."""
    inside = (slots >= 0) & (slots < records.shape[0])
    held = records[torch.where(inside, slots, 0)]
    unchanged = inside & ((held[:, fields.FLAGS] & fields.STAMPED) != 0)
    unchanged &= (held[:, fields.DIGEST] == digests) & (held[:, fields.SUM] == sums)
    bits = unchanged * NOTE_UNCHANGED + (inside & (nonfinite != 0)) * NOTE_NONFINITE
    items = bits.nonzero().squeeze(1)
    out.append(torch.stack([items, bits[items]], dim=1))

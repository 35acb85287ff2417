"""Comparing records with what was read, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from canary_kernels import records as fields

if TYPE_CHECKING:
    from canary_kernels.findings import Findings


def compare(
    records: torch.Tensor,
    slots: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    out: Findings,
    *,
    item_base: int,
) -> None:
    """Appends the mismatches of `canary_kernels.compare.launch_compare`."""
    inside = (slots >= 0) & (slots < records.shape[0])
    stored = records[torch.where(inside, slots, 0)]
    stored_digest = torch.where(inside, stored[:, fields.DIGEST], 0)
    stored_sum = torch.where(inside, stored[:, fields.SUM], 0)
    known = inside & ((stored[:, fields.FLAGS] & fields.STAMPED) != 0)
    bad = ~known | (stored_digest != digests) | (stored_sum != sums)
    items = bad.nonzero().squeeze(1)
    out.append(
        torch.stack(
            [items + item_base, stored_digest[items], digests[items], stored_sum[items], sums[items]],
            dim=1,
        )
    )

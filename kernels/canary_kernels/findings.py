"""Compacted results on the device: rows up to a capacity, and the true count beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Findings:
    """rows int64 [capacity, width], order free; count int64 [1] goes on beyond the capacity. Each row's first column
    is the item's number."""

    rows: torch.Tensor
    count: torch.Tensor

    @classmethod
    def allocate(cls, *, capacity: int, width: int, device: torch.device) -> Findings:
        """Empty findings."""
        return cls(
            rows=torch.zeros((capacity, width), dtype=torch.int64, device=device),
            count=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def reset(self) -> None:
        """Empties the findings; on CUDA in the current stream."""
        self.count.zero_()

    def append(self, rows: torch.Tensor) -> None:
        """Appends rows [m, width] as far as they fit and counts them all (host tensors)."""
        used = min(int(self.count), self.rows.shape[0])
        fits = min(rows.shape[0], self.rows.shape[0] - used)
        self.rows[used : used + fits] = rows[:fits]
        self.count.add_(rows.shape[0])

"""Stamping records in torch."""

from __future__ import annotations

import torch

from canary_kernels import records as fields
from canary_kernels.reference.chain import chain_hashes
from canary_kernels.scheme import Scheme


def stamp(
    *,
    records: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    item_offsets: torch.Tensor,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    generations: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    scheme: Scheme,
    key: int,
) -> None:
    """Writes the records of `canary_kernels.stamp.launch_stamp`."""
    valid = (slots >= 0) & (slots < records.shape[0]) & (positions >= 0)
    before, _ = chain_hashes(scheme, seeds, tokens, torch.where(valid, positions, -1), item_offsets, key=key)
    rows = torch.empty((slots.numel(), fields.FIELDS), dtype=torch.int64, device=records.device)
    rows[:, fields.TOKEN] = tokens
    rows[:, fields.POSITION] = positions
    rows[:, fields.PREV_HASH] = before
    rows[:, fields.DIGEST] = digests
    rows[:, fields.SUM] = sums
    rows[:, fields.GENERATION] = generations
    rows[:, fields.FLAGS] = torch.where(tokens < 0, fields.STAMPED | fields.CHAIN_UNKNOWN, fields.STAMPED)
    rows = rows[valid]
    rows[:, fields.PREV_DIGEST] = records[slots[valid], fields.DIGEST]
    records[slots[valid]] = rows

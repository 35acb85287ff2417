"""Slot records and violation rows in torch."""

from __future__ import annotations

import torch

from canary_kernels.constants import CHAIN_HEAD, signed
from canary_kernels.context import RING_INDEX_LIMIT, SLOT_FIELD_BYTES, VerifyOrWriteContext
from canary_kernels.reference.mixing import mix3


def load_records(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Token, position, prev_hash and real_kv_hash of each slot, int64 [n, 4]; any slot stride. Slots in range."""
    return buffer[:, :SLOT_FIELD_BYTES].index_select(0, slots).view(torch.int64).reshape(-1, 4)


def store_records(buffer: torch.Tensor, slots: torch.Tensor, records: torch.Tensor) -> None:
    """Store int64 [n, 4] records at distinct slots in range."""
    buffer[:, :SLOT_FIELD_BYTES].index_copy_(0, slots, records.contiguous().view(torch.uint8))


def next_hashes(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The chain hash after each slot: `mix3` of its record, the anchor's for slots outside the buffer. int64 [n]."""
    inside = (slots >= 0) & (slots < buffer.shape[0])
    out = torch.full_like(slots, signed(CHAIN_HEAD))
    records = load_records(buffer, slots[inside])
    out[inside] = mix3(records[:, 2], records[:, 0], records[:, 1])
    return out


def record_rows(context: VerifyOrWriteContext, rows: torch.Tensor) -> None:
    """Append int64 [n, 8] rows while 0 <= index < capacity; the counter goes on and stays at 2^30."""
    index = context.violation_write_index
    current = int(index[0])
    if not rows.shape[0] or current >= RING_INDEX_LIMIT:
        return
    targets = torch.arange(current, current + rows.shape[0], device=rows.device)
    keep = (targets >= 0) & (targets < context.violation_ring.shape[0])
    context.violation_ring[targets[keep]] = rows[keep]
    index[0] = min(current + rows.shape[0], RING_INDEX_LIMIT)

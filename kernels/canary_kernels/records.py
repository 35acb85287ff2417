"""The slot record: 64 bytes per slot, the first 32 laid out as in SGLang's in-engine canary.

The first 24 bytes are all that a link check needs, so that it reads one 32-byte sector per record: a position below 0
says that no stamp wrote the record (a stamp skips negative positions), a token below 0 that the stamp did not know it.
`flags` says the same in the second sector, whose last word is the digest of the stamp before this one, 0 for the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canary_kernels.constants import RECORD_BYTES

FIELDS = RECORD_BYTES // 8
TOKEN, POSITION, PREV_HASH, DIGEST, SUM, GENERATION, FLAGS, PREV_DIGEST = range(FIELDS)

LINK_FIELDS = PREV_HASH + 1
"""The leading fields by which links are judged."""

NEVER_STAMPED = -1
"""Position of a record that no stamp wrote."""
STAMPED = 1
"""`flags` bit: the record was written by a stamp, its position is not negative. Others are never judged."""
CHAIN_UNKNOWN = 2
"""`flags` bit: the stamp did not know the token (it is negative), so neither token nor chain can be judged."""

OUT_OF_RANGE_SLOT = (1 << 63) - 1
"""Slot number of an item whose page or page-list index is out of range; never dereferenced."""


@dataclass(frozen=True, kw_only=True)
class SlotRecord:
    """One record on the host; 64-bit hashes as int64 bits."""

    token: int
    position: int
    prev_hash: int
    digest: int
    sum: int
    generation: int
    flags: int
    prev_digest: int

    @property
    def stamped(self) -> bool:
        """Whether a stamp wrote this record."""
        return bool(self.flags & STAMPED)


def allocate_records(num_slots: int, device: torch.device) -> torch.Tensor:
    """Records of a group: int64 [num_slots, 8], none of them stamped."""
    records = torch.zeros((num_slots, FIELDS), dtype=torch.int64, device=device)
    records[:, POSITION] = NEVER_STAMPED
    return records

"""Which word of a slot changed, when exactly one did.

With δ = S' - S (mod 2^64) the word that changed is the one whose old value w' - δ turns the digest back into the stored
one: `D' - s(w' ^ k) + s((w' - δ) ^ k) = D`. Native scheme only; the fold is not additive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canary_kernels.constants import signed, unsigned
from canary_kernels.layout import GroupLayout, Region
from canary_kernels.reference.digest import keys
from canary_kernels.reference.mixing import mix


@dataclass(frozen=True, kw_only=True)
class WordChange:
    """One changed word: region number, word number in the slot, its byte offset in the slot's bytes of that region,
    and the old and new value (unsigned)."""

    region: int
    word: int
    old: int
    new: int

    @property
    def byte_offset(self) -> int:
        """Offset of the word in the slot's bytes of the region, pieces joined."""
        return self.word * 8

    @property
    def changed_bits(self) -> int:
        """The bits that differ."""
        return self.old ^ self.new


def slot_words(layout: GroupLayout, region: Region, slot: int) -> torch.Tensor:
    """The words of one slot of a region, int64 [words] on the host; a missing upper half is 0.

    Raises:
        IndexError: the slot is outside the group.
    """
    if not 0 <= slot < layout.num_slots:
        raise IndexError(f"slot {slot} is outside [0, {layout.num_slots})")
    page, offset = divmod(slot, layout.page_size)
    start = region.offset + page * region.page_stride + offset * region.slot_stride
    pieces = region.memory[start:].as_strided(
        (region.pieces, region.piece_bytes), (region.piece_stride, 1), region.memory.storage_offset() + start
    )
    padded = torch.zeros(region.words * 8, dtype=torch.uint8)
    padded[: region.slot_bytes] = pieces.reshape(-1).cpu()
    return padded.view(torch.int64)


def locate_word_change(layout: GroupLayout, slot: int, *, stored_digest: int, stored_sum: int) -> WordChange | None:
    """The one 8-byte word of `slot` that differs from what was stamped; None if none or several changed.

    Args:
        layout: the group; its memory is read now.
        slot: in [0, num_slots).
        stored_digest, stored_sum: what the native stamp recorded, as int64 bits.

    Raises:
        IndexError: the slot is outside the group.
    """
    words = [slot_words(layout, region, slot) for region in layout.regions]
    word_keys, region_keys = (table.cpu() for table in keys(layout, layout.device))
    key = [region_keys[number] ^ word_keys[: row.numel()] for number, row in enumerate(words)]
    mixed = [mix(row ^ key[number]) for number, row in enumerate(words)]
    digest = sum(int(row.sum()) for row in mixed)
    delta = signed(sum(int(row.sum()) for row in words) - stored_sum)
    wanted = signed(stored_digest - digest)
    found: list[WordChange] = []
    for number, row in enumerate(words):
        old = row - delta
        fits = (mix(old ^ key[number]) - mixed[number]) == wanted
        found += [
            WordChange(region=number, word=word, old=unsigned(int(old[word])), new=unsigned(int(row[word])))
            for word in fits.nonzero().squeeze(1).tolist()
            if delta != 0
        ]
    return found[0] if len(found) == 1 else None

"""A finding names the word that changed, or says that it cannot."""

from __future__ import annotations

import native_oracle as oracle
import pytest
import torch
from canary_kernels import locate_word_change
from native_layouts import NAMES, layout


def address(group, region, slot, byte):
    """Index in the region's memory of one byte of a slot."""
    page, offset = divmod(slot, group.page_size)
    piece, within = divmod(byte, region.piece_bytes)
    return (
        region.offset + page * region.page_stride + offset * region.slot_stride + piece * region.piece_stride + within
    )


@pytest.mark.parametrize("name", NAMES)
def test_any_single_change_is_located(name, generator):
    group = layout(name, generator)

    def draw(high):
        return int(torch.randint(0, high, (1,), generator=generator))

    for _ in range(12):
        slot, number = draw(group.num_slots), draw(len(group.regions))
        region = group.regions[number]
        byte, mask = draw(region.slot_bytes), 1 + draw(255)
        stored = oracle.digest(group, slot)
        old = oracle.words(oracle.slot_bytes(group, region, slot))[byte // 8]
        at = address(group, region, slot, byte)
        region.memory[at] ^= mask
        change = locate_word_change(group, slot, stored_digest=stored[0], stored_sum=stored[1])
        assert change is not None
        assert (change.region, change.word, change.old) == (number, byte // 8, old)
        assert change.changed_bits == mask << (8 * (byte % 8))
        assert change.byte_offset == byte // 8 * 8


def test_two_changed_words_are_not_mislocated(generator):
    group = layout("mixed", generator)
    for slot in range(group.num_slots):
        stored = oracle.digest(group, slot)
        for number in (0, 3):
            region = group.regions[number]
            region.memory[address(group, region, slot, 8 + number)] ^= 0x21
        assert locate_word_change(group, slot, stored_digest=stored[0], stored_sum=stored[1]) is None


@pytest.mark.parametrize("name", ["mixed", "tiny"])
def test_an_unchanged_slot_has_no_change(name, generator):
    """Not even a slot of one word, of which that word fits."""
    group = layout(name, generator)
    last = group.num_slots - 1
    stored = oracle.digest(group, last)
    assert locate_word_change(group, last, stored_digest=stored[0], stored_sum=stored[1]) is None


def test_a_slot_outside_the_group_is_refused(generator):
    group = layout("nhd", generator)
    with pytest.raises(IndexError, match="slot 80 is outside"):
        locate_word_change(group, 80, stored_digest=0, stored_sum=0)

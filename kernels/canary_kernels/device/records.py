"""Slot records and violation rows in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from canary_kernels.constants import CHAIN_HEAD, signed
from canary_kernels.context import RING_INDEX_LIMIT
from canary_kernels.device.mixing import mix3

HEAD = tl.constexpr(signed(CHAIN_HEAD))
LIMIT = tl.constexpr(RING_INDEX_LIMIT)

TOKEN = tl.constexpr(0)
POSITION = tl.constexpr(1)
PREV_HASH = tl.constexpr(2)
REAL_HASH = tl.constexpr(3)


def record_alignment(buffer: torch.Tensor) -> int:
    """How many bytes of a record can be read or written at once: 16, 8 or 1."""
    return next(unit for unit in (16, 8, 1) if buffer.shape[1] % unit == 0 and buffer.data_ptr() % unit == 0)


@triton.jit
def load_field(buffer, stride, slot, field: tl.constexpr, mask, ALIGNMENT: tl.constexpr):
    """One int64 field of each slot's record, 0 outside the mask; any stride of at least 32 bytes."""
    start = buffer + slot * stride + field * 8
    if ALIGNMENT >= 8:
        value = tl.load(start.to(tl.pointer_type(tl.int64)), mask=mask, other=0)
    else:
        value = tl.zeros_like(slot)
        for byte in tl.static_range(8):
            value = value | (tl.load(start + byte, mask=mask, other=0).to(tl.int64) << (8 * byte))
    return value


@triton.jit
def load_record(buffer, stride, slot, mask, ALIGNMENT: tl.constexpr):
    """Token, position, previous hash and real-KV hash of each slot's record, 0 outside the mask."""
    if ALIGNMENT == 16:
        # two loads of 16 bytes; the compiler must be able to tell that they are aligned
        words = tl.multiple_of(buffer.to(tl.pointer_type(tl.int64)), 16)
        pairs = words + (slot * (stride // 16) * 2)[:, None] + tl.arange(0, 2)[None, :]
        token, position = tl.split(tl.load(pairs, mask=mask[:, None], other=0))
        prev_hash, real_hash = tl.split(tl.load(pairs + 2, mask=mask[:, None], other=0))
    else:
        token = load_field(buffer, stride, slot, TOKEN, mask, ALIGNMENT)
        position = load_field(buffer, stride, slot, POSITION, mask, ALIGNMENT)
        prev_hash = load_field(buffer, stride, slot, PREV_HASH, mask, ALIGNMENT)
        real_hash = load_field(buffer, stride, slot, REAL_HASH, mask, ALIGNMENT)
    return token, position, prev_hash, real_hash


@triton.jit
def store_field(buffer, stride, slot, field: tl.constexpr, value, mask, ALIGNMENT: tl.constexpr):
    """Store one int64 field of each slot's record."""
    start = buffer + slot * stride + field * 8
    if ALIGNMENT >= 8:
        tl.store(start.to(tl.pointer_type(tl.int64)), value, mask=mask)
    else:
        for byte in tl.static_range(8):
            tl.store(start + byte, ((value >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def next_hash(buffer, stride, num_slots, slot, mask, ALIGNMENT: tl.constexpr):
    """The chain hash after each slot: mix3 of its record; the anchor's for slots outside the buffer."""
    inside = mask & (slot >= 0) & (slot < num_slots)
    prev_hash = load_field(buffer, stride, slot, PREV_HASH, inside, ALIGNMENT)
    token = load_field(buffer, stride, slot, TOKEN, inside, ALIGNMENT)
    position = load_field(buffer, stride, slot, POSITION, inside, ALIGNMENT)
    return tl.where(inside, mix3(prev_hash, token, position), HEAD)


@triton.jit
def record_rows(
    ring, capacity, index, failing, kind, slot, position, token, expected_token, chain_hash, expected_aux, bits
):
    """Append one row per failing lane while 0 <= row < capacity. The counter goes on and stays at 2^30.

    Concurrent programs may push it past 2^30 for a moment; each that does pulls it back, so it cannot wrap.
    """
    flags = failing.to(tl.int32)
    count = tl.sum(flags, 0)
    if count > 0:
        # an atomic, not a load: one thread reads and tells the others, so that all take the same branch
        current = tl.atomic_add(index, 0, sem="relaxed")
        if current < LIMIT:
            base = tl.atomic_add(index, count, sem="relaxed").to(tl.int64)
            if base + count > LIMIT:
                tl.atomic_min(index, LIMIT, sem="relaxed")
            row = base + tl.cumsum(flags, 0) - flags
            keep = failing & (row >= 0) & (row < capacity)
            target = ring + row * 8
            empty = tl.zeros_like(slot)
            tl.store(target, empty + kind, mask=keep)
            tl.store(target + 1, slot, mask=keep)
            tl.store(target + 2, empty + position, mask=keep)
            tl.store(target + 3, empty + token, mask=keep)
            tl.store(target + 4, empty + expected_token, mask=keep)
            tl.store(target + 5, empty + chain_hash, mask=keep)
            tl.store(target + 6, empty + expected_aux, mask=keep)
            tl.store(target + 7, empty + bits, mask=keep)

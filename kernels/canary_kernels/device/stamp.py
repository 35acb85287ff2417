"""Stamping records in Triton: one program per run, the native chain by an affine scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from canary_kernels.device.mixing import mix, mix3
from canary_kernels.scheme import Scheme

_BLOCK = 256

FACTOR = tl.constexpr(0xD1342543DE82EF95 - (1 << 64))
INVERSE = tl.constexpr(0x572B5EE77A54E3BD)
FIELDS = tl.constexpr(8)
STAMPED = tl.constexpr(1)
CHAIN_UNKNOWN = tl.constexpr(2)


@triton.jit
def then(first_factor, first_term, second_factor, second_term):
    """The affine map that applies the first map and then the second one."""
    return first_factor * second_factor, first_term * second_factor + second_term


@triton.jit
def store_record(records, slot, token, position, before, digest, total, generation, live):
    """Stores all eight fields where `live`."""
    record = records + slot * FIELDS
    flags = tl.where(token < 0, STAMPED | CHAIN_UNKNOWN, STAMPED).to(tl.int64)
    tl.store(record, token, mask=live)
    tl.store(record + 1, position, mask=live)
    tl.store(record + 2, before, mask=live)
    tl.store(record + 3, digest, mask=live)
    tl.store(record + 4, total, mask=live)
    tl.store(record + 5, generation, mask=live)
    tl.store(record + 6, flags, mask=live)
    tl.store(record + 7, flags - flags, mask=live)


@triton.jit(do_not_specialize=["n", "num_slots", "key"])
def stamp_kernel(
    records,
    slots,
    positions,
    item_offsets,
    seeds,
    tokens,
    generations,
    digests,
    sums,
    n: tl.int64,
    num_slots: tl.int64,
    key: tl.int64,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program r stamps run r. Native: BLOCK items per step; sglang: one item per step, as its chain demands."""
    run = tl.program_id(0).to(tl.int64)
    at = tl.maximum(tl.load(item_offsets + run), 0)
    end = tl.minimum(tl.load(item_offsets + run + 1), n)
    state = tl.load(seeds + run)
    lane = tl.arange(0, BLOCK)
    while at < end:
        item = at + lane
        mask = item < end
        slot = tl.load(slots + item, mask=mask, other=-1)
        position = tl.load(positions + item, mask=mask, other=-1)
        token = tl.load(tokens + item, mask=mask, other=0)
        live = mask & (slot >= 0) & (slot < num_slots) & (position >= 0)
        if NATIVE:
            term = mix(mix(token ^ key) ^ position)
            factor = tl.where(live, FACTOR, 1).to(tl.int64)
            factors, terms = tl.associative_scan((factor, tl.where(live, term, 0)), 0, then)
            after = factors * state + terms
            before = tl.where(live, (after - term) * INVERSE, after)
            # Lanes behind the end are identities, so the last lane holds the state after the block.
            state = tl.sum(tl.where(lane == BLOCK - 1, after, 0), axis=0)
        else:
            before = tl.zeros([BLOCK], dtype=tl.int64) + state
            after = tl.where(live, mix3(before, token, position), before)
            state = tl.sum(after, axis=0)
        digest = tl.load(digests + item, mask=live, other=0)
        total = tl.load(sums + item, mask=live, other=0)
        generation = tl.load(generations + item, mask=live, other=0)
        store_record(records, slot, token, position, before, digest, total, generation, live)
        at += BLOCK


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
    """Launches `stamp_kernel`."""
    native = scheme == "native"
    if seeds.numel() == 0:
        return
    stamp_kernel[(seeds.numel(),)](
        records,
        slots,
        positions,
        item_offsets,
        seeds,
        tokens,
        generations,
        digests,
        sums,
        slots.numel(),
        records.shape[0],
        key,
        NATIVE=native,
        BLOCK=_BLOCK if native else 1,
        num_warps=4 if native else 1,
    )

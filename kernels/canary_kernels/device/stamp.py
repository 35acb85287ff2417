"""Stamping records in Triton: a tile of items per program, the native chain by affine scans."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from canary_kernels.device.mixing import mix, mix3
from canary_kernels.device.sizes import bounded_size, fixed_grid, size_on_device
from canary_kernels.items import Items
from canary_kernels.scheme import Scheme

_BLOCK = 256
_CHUNK = 1024
_WARPS = 4

FACTOR = tl.constexpr(0xD1342543DE82EF95 - (1 << 64))
INVERSE = tl.constexpr(0x572B5EE77A54E3BD)
MAX_CHUNK_BITS = tl.constexpr(12)
FIELDS = tl.constexpr(8)
PREV_HASH = tl.constexpr(2)
STAMPED = tl.constexpr(1)
CHAIN_UNKNOWN = tl.constexpr(2)


@triton.jit
def then(first_factor, first_term, second_factor, second_term):
    """The affine map that applies the first map and then the second one."""
    return first_factor * second_factor, first_term * second_factor + second_term


@triton.jit
def is_live(slot, position, mask, num_slots):
    """Items that are stamped and advance the chain."""
    return mask & (slot >= 0) & (slot < num_slots) & (position >= 0)


@triton.jit
def load_chain(slots, positions, tokens, item, mask, num_slots, key):
    """Of each item whether it is live, and its term m = s(s(token ^ key) ^ position) of the chain h' = h*R + m."""
    slot = tl.load(slots + item, mask=mask, other=-1)
    position = tl.load(positions + item, mask=mask, other=-1)
    token = tl.load(tokens + item, mask=mask, other=0)
    live = is_live(slot, position, mask, num_slots)
    return live, tl.where(live, mix(mix(token ^ key) ^ position), 0)


@triton.jit
def chain_after(slots, positions, tokens, start, end, seed, num_slots, key, CHUNK: tl.constexpr):
    """The native chain's hash after the items [start, end) of one run that begins with `seed`.

    While all items are live: lane l of a chunk weighs its term with R^(lanes behind it), and from chunk to chunk all
    lanes are multiplied by R^CHUNK, so that nothing waits for a neighbour before the last sum. With skipped items the
    powers are others: then chunk by chunk with a scan.
    """
    lane = tl.arange(0, CHUNK)
    behind = CHUNK - 1 - lane
    weight = tl.full((CHUNK,), 1, tl.int64)
    power = start * 0 + FACTOR
    for bit in tl.static_range(MAX_CHUNK_BITS):
        if (1 << bit) < CHUNK:
            weight = tl.where(((behind >> bit) & 1) != 0, weight * power, weight)
            power = power * power

    # The seed stands as the term of an item before the first one. Chunks end at `end`: the first one may be partial.
    total = tl.zeros((CHUNK,), tl.int64)
    skipped = tl.zeros((CHUNK,), tl.int32)
    at = end - ((end - start) // CHUNK + 1) * CHUNK
    while at < end:
        item = at + lane
        mask = item >= start
        live, term = load_chain(slots, positions, tokens, item, mask, num_slots, key)
        total = total * power + tl.where(item == start - 1, seed, term)
        skipped += (mask & (live == 0)).to(tl.int32)
        at += CHUNK
    state = tl.sum(total * weight, axis=0)

    if tl.sum(skipped, axis=0) > 0:
        state = seed
        at = start
        while at < end:
            item = at + lane
            live, term = load_chain(slots, positions, tokens, item, item < end, num_slots, key)
            factors, terms = tl.associative_scan((tl.where(live, FACTOR, 1).to(tl.int64), term), 0, then)
            # lanes behind the end change nothing, so the last lane holds the state after the chunk
            state = tl.sum(tl.where(lane == CHUNK - 1, factors * state + terms, 0), axis=0)
            at += CHUNK
    return state


_WORK_LISTS = ["slots", "positions", "run_numbers", "item_offsets", "seeds", "tokens", "generations", "digests", "sums"]
_SIZES = ["run_count", "item_count", "run_capacity", "item_capacity", "num_slots"]


@triton.jit(do_not_specialize=[*_WORK_LISTS, *_SIZES, "key"])
def stamp_kernel(
    records,
    slots,
    positions,
    run_numbers,
    item_offsets,
    seeds,
    tokens,
    generations,
    digests,
    sums,
    run_count,
    item_count,
    run_capacity: tl.int64,
    item_capacity: tl.int64,
    num_slots: tl.int64,
    key: tl.int64,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The eight fields of each live item's record; a tile of BLOCK items per step, tiles independent of each other.

    Native: before = (after - m)*R^-1 with after = h*R + m, by one scan over the tile; a run's head is the constant map
    to the hash after it, and a tile that begins inside a run first finds the hash there, from the run's seed and the
    items between. sglang: all fields but the previous hash, which `stamp_walk_kernel` stores.

    Reads seven int64 per item, two per run, and tokens, positions and slots of a run's items again for each of its
    tiles; writes 64 bytes per item.

    Floor: 56 bytes read and 64 written per item.
    """
    k = bounded_size(run_count, run_capacity)
    n = bounded_size(item_count, item_capacity)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    while at < n:
        item = at + tl.arange(0, BLOCK)
        mask = item < n
        run = tl.load(run_numbers + item, mask=mask, other=-1)
        slot = tl.load(slots + item, mask=mask, other=-1)
        position = tl.load(positions + item, mask=mask, other=-1)
        token = tl.load(tokens + item, mask=mask, other=0)
        owned = mask & (run >= 0) & (run < k)
        live = is_live(slot, position, owned, num_slots)
        # of all items: a mask that is loaded first would cost its latency
        digest = tl.load(digests + item, mask=mask, other=0)
        total = tl.load(sums + item, mask=mask, other=0)
        generation = tl.load(generations + item, mask=mask, other=0)
        record = records + tl.where(live, slot, 0) * FIELDS
        if NATIVE:
            head = owned & (item == tl.maximum(tl.load(item_offsets + run, mask=owned, other=-1), 0))
            seed = tl.load(seeds + run, mask=head, other=0)
            term = tl.where(live, mix(mix(token ^ key) ^ position), 0)
            factor = tl.where(live, FACTOR, 1).to(tl.int64)
            factors, terms = tl.associative_scan(
                (tl.where(head, 0, factor), tl.where(head, seed * factor + term, term)), 0, then
            )
            state = at * 0
            first_run = tl.load(run_numbers + at)
            if (first_run >= 0) & (first_run < k):
                start = tl.maximum(tl.load(item_offsets + first_run), 0)
                if start < at:
                    first_seed = tl.load(seeds + first_run)
                    state = chain_after(slots, positions, tokens, start, at, first_seed, num_slots, key, CHUNK)
            tl.store(record + PREV_HASH, (factors * state + terms - term) * INVERSE, mask=live)
        tl.store(record, token, mask=live)
        tl.store(record + 1, position, mask=live)
        before = tl.load(record + 3, mask=live, other=0)
        tl.store(record + 3, digest, mask=live)
        tl.store(record + 4, total, mask=live)
        tl.store(record + 5, generation, mask=live)
        tl.store(record + 6, tl.where(token < 0, STAMPED | CHAIN_UNKNOWN, STAMPED).to(tl.int64), mask=live)
        tl.store(record + 7, before, mask=live)
        at += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit(do_not_specialize=["slots", "positions", "item_offsets", "seeds", "tokens", *_SIZES])
def stamp_walk_kernel(
    records,
    slots,
    positions,
    item_offsets,
    seeds,
    tokens,
    run_count,
    item_count,
    run_capacity: tl.int64,
    item_capacity: tl.int64,
    num_slots: tl.int64,
):
    """sglang: the previous hash of each live item's record, h' = mix3(h, token, position); one program per run.

    Reads 24 bytes per item and 24 per run, writes 8 per item.

    Floor: a run's length times the latency of mix3.
    """
    k = bounded_size(run_count, run_capacity)
    n = bounded_size(item_count, item_capacity)
    run = tl.program_id(0).to(tl.int64)
    while run < k:
        at = tl.maximum(tl.load(item_offsets + run), 0)
        end = tl.minimum(tl.load(item_offsets + run + 1), n)
        state = tl.load(seeds + run)
        while at < end:
            slot = tl.load(slots + at)
            position = tl.load(positions + at)
            token = tl.load(tokens + at)
            live = (slot >= 0) & (slot < num_slots) & (position >= 0)
            tl.store(records + tl.where(live, slot, 0) * FIELDS + PREV_HASH, state, mask=live)
            state = tl.where(live, mix3(state, token, position), state)
            at += 1
        run += tl.num_programs(0).to(tl.int64)


def enqueue_stamp(
    records: torch.Tensor,
    items: Items,
    item_offsets: torch.Tensor,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    generations: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    *,
    run_count: torch.Tensor,
    item_count: torch.Tensor,
    scheme: Scheme,
    key: int,
) -> None:
    """Launches `stamp_kernel`, and `stamp_walk_kernel` before it in scheme sglang.

    Args:
        records: int64 [num_slots, 8].
        items: slots, positions and run numbers are read (int64 [capacity]); an item of no run is not stamped.
        item_offsets, seeds: int64 [run capacity + 1], [run capacity].
        tokens, generations, digests, sums: int64 [capacity].
        run_count, item_count: int64 [1] on the device, clamped to the capacities. Allocates nothing and never waits.
        key: int64 bits of the chain's secret.
    """
    native = scheme == "native"
    item_capacity, run_capacity = items.slots.numel(), seeds.numel()
    if not native:
        stamp_walk_kernel[fixed_grid(run_capacity, 1)](
            records,
            items.slots,
            items.positions,
            item_offsets,
            seeds,
            tokens,
            run_count,
            item_count,
            run_capacity,
            item_capacity,
            records.shape[0],
            num_warps=1,
        )
    stamp_kernel[fixed_grid(item_capacity, _BLOCK)](
        records,
        items.slots,
        items.positions,
        items.run_numbers,
        item_offsets,
        seeds,
        tokens,
        generations,
        digests,
        sums,
        run_count,
        item_count,
        run_capacity,
        item_capacity,
        records.shape[0],
        key,
        NATIVE=native,
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
        num_warps=_WARPS,
    )


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
    """Stamps all items; see `canary_kernels.stamp.launch_stamp`."""
    numbers = torch.arange(slots.numel(), device=slots.device)
    run_numbers = torch.searchsorted(item_offsets[1:], numbers, right=True)
    enqueue_stamp(
        records,
        Items(slots=slots, positions=positions, prev_slots=slots, run_numbers=run_numbers),
        item_offsets,
        seeds,
        tokens,
        generations,
        digests,
        sums,
        run_count=size_on_device(seeds.numel(), slots.device),
        item_count=size_on_device(slots.numel(), slots.device),
        scheme=scheme,
        key=key,
    )

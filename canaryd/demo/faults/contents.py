"""Faults of the pool's bytes."""

from __future__ import annotations

from collections.abc import Callable

from canaryd.demo.bench import Bench, NoTarget
from canaryd.demo.faults.injection import (
    Fault,
    Injection,
    bytes_fault,
    is_tame,
    noise,
    page_slots,
)
from canaryd.engines.transformers.geometry import Group

_DRAWS = 32


def _flipped(bench: Bench, data: bytearray, count: int) -> bytearray:
    size = len(data)
    if bench.rng.random() < 0.5:
        # the ends of a slot are where a copy or a mask goes wrong by one
        bits = [bench.rng.choice((0, size - 1)) * 8 + bit for bit in bench.rng.sample(range(8), count)]
    else:
        bits = bench.rng.sample(range(8 * size), count)
    flipped = bytearray(data)
    for bit in bits:
        flipped[bit // 8] ^= 1 << bit % 8
    return flipped


def bit_flips(count: int, pick: Callable[[], tuple[Group, int]] | None = None) -> Fault:
    """`count` flipped bits in one part of a slot, a random one or that of `pick`, often in its first or last byte."""

    def fault(bench: Bench) -> Injection:
        group, slot = pick() if pick is not None else bench.pick_slot()
        offset, size = bench.pool.row_span(group, slot, bench.rng.randrange(bench.pool.parts(group)))

        def act() -> None:
            data = bench.pool.read(offset, size)
            drawn = (_flipped(bench, data, count) for _ in range(_DRAWS))
            # flips of the exponent are drawn again where the number would spread as NaN
            bench.pool.write(
                offset, next((each for each in drawn if is_tame(bench, each)), _flipped(bench, data, count))
            )

        return bytes_fault(bench, group, [slot], act)

    return fault


def word(bench: Bench) -> Injection:
    """One 8-byte word overwritten."""
    group, slot = bench.pick_slot()
    offset, size = bench.pool.row_span(group, slot, bench.rng.randrange(bench.pool.parts(group)))
    at = offset + 8 * bench.rng.randrange(size // 8)
    return bytes_fault(bench, group, [slot], lambda: bench.pool.write(at, noise(bench, bench.pool.read(at, 8))))


def layer_row(bench: Bench) -> Injection:
    """One slot's row of one layer's K or V overwritten."""
    group, slot = bench.pick_slot()
    offset, size = bench.pool.row_span(group, slot, bench.rng.randrange(bench.pool.parts(group)))
    return bytes_fault(
        bench, group, [slot], lambda: bench.pool.write(offset, noise(bench, bench.pool.read(offset, size)))
    )


def _write_row(bench: Bench, group: Group, slot: int) -> Injection:
    """A whole token of other content, in all layers."""

    def act() -> None:
        for part in range(bench.pool.parts(group)):
            offset, size = bench.pool.row_span(group, slot, part)
            bench.pool.write(offset, noise(bench, bench.pool.read(offset, size)))

    return bytes_fault(bench, group, [slot], act)


def padding_row(bench: Bench) -> Injection:
    """A padding row of a graph that writes a live slot, in all layers."""
    group, slot = bench.pick_slot()
    return _write_row(bench, group, slot)


def wrapped_slot(bench: Bench) -> Injection:
    """A write at slot -1: it wraps to the last slot."""

    def reached(group: Group) -> bool:
        last = group.num_pages - 1
        if (group.number, last) in bench.avoid:
            return False
        if last in group.allocator.ledger.cached_blocks:
            return True
        for request_id in bench.holders(group, last):
            state = bench.processor.scheduler.active_requests.get(request_id)
            index = group.allocator.block_table[request_id].index(last)
            if state is not None and state.position_offset > (index + 1) * group.page_size:
                return True
        return False

    groups = bench.between_steps(lambda: [group for group in bench.groups if reached(group)])
    if not groups:
        raise NoTarget("the last slot holds no token")
    group = bench.rng.choice(groups)
    return _write_row(bench, group, group.num_pages * group.page_size - 1)


def whole_page(bench: Bench) -> Injection:
    """A page overwritten in all layers."""
    group, slot = bench.pick_slot()
    page = slot // group.page_size
    offset, size = bench.pool.page_span(group, page)
    injection = bytes_fault(
        bench, group, [slot], lambda: bench.pool.write(offset, noise(bench, bench.pool.read(offset, size)))
    )
    injection.slots = page_slots(group, page)
    return injection


def stride_clear(bench: Bench) -> Injection:
    """A clear with a wrong stride: one layer's page of a neighbour becomes zero."""
    group, slot = bench.pick_slot()
    page = slot // group.page_size
    offset, size = bench.pool.layer_span(group, page, bench.rng.randrange(bench.pool.parts(group)))
    injection = bytes_fault(bench, group, [slot], lambda: bench.pool.write(offset, bytes(size)))
    injection.slots = page_slots(group, page)
    return injection


def long_copy(bench: Bench) -> Injection:
    """A copy of one page too many: the page behind the destination becomes that behind the source."""
    group, slot = bench.pick_slot()
    page = slot // group.page_size
    others = [other for other in range(group.first_page, group.num_pages) if other != page]
    source, size = bench.pool.page_span(group, bench.rng.choice(others))
    destination, _ = bench.pool.page_span(group, page)

    def act() -> None:
        data = bench.pool.read(source, size)
        if data == bench.pool.read(destination, size):
            raise NoTarget("source and destination are equal")
        bench.pool.write(destination, data)

    injection = bytes_fault(bench, group, [slot], act)
    injection.slots = page_slots(group, page)
    return injection


def write_after_free(bench: Bench) -> Injection:
    """A transfer of a request that is gone lands in a page that has another owner by now."""

    def pick() -> tuple[Group, int]:
        running = bench.running()
        found = [
            (group, slot)
            for group in bench.groups
            for request_id, state in running.items()
            for position in bench.written(group, state)[:: max(1, group.page_size // 2)]
            if (slot := bench.slot_of(group, request_id, position)) // group.page_size in bench.inherited[group.number]
            and (group.number, slot // group.page_size) not in bench.avoid
        ]
        if not found:
            raise NoTarget("no page was handed on yet")
        return bench.rng.choice(found)

    group, slot = bench.between_steps(pick)
    return _write_row(bench, group, slot)


def tokens_swapped(bench: Bench) -> Injection:
    """Two tokens of one page change places, in all layers: sums over the page do not see it."""
    group, slot = bench.pick_slot()
    first = slot - slot % group.page_size
    other = slot - 1 if slot > first else slot + 1

    def act() -> None:
        for part in range(bench.pool.parts(group)):
            (here, size), (there, _) = bench.pool.row_span(group, slot, part), bench.pool.row_span(group, other, part)
            one, two = bench.pool.read(here, size), bench.pool.read(there, size)
            bench.pool.write(here, two)
            bench.pool.write(there, one)

    injection = bytes_fault(bench, group, [slot], act)
    injection.slots = [slot, other]
    return injection

"""The fault classes, injected from the engine's side of memory at random places and times.

A fault says which pages and requests it touched and whether the daemon guarded the place: for faults of bytes and
tables a witness slot must have been settled, with the same content generation, right before and right behind.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from canaryd.demo.bench import Bench, Fence, Guard, NoTarget
from canaryd.demo.models import VOCABULARY
from canaryd.engines.transformers.geometry import Group

STANDS = ("settled", "suspect", "damaged")
"""States of a slot whose stamp was final when it was hit."""
_LEFT_TO_RUN = 60
"""Tokens that a request must still have to come, for faults that live as long as it does."""


Witnesses = list[tuple[int, int]]
"""Slots that were settled, and their content generation."""


@dataclass
class Injection:
    """One injected fault. `pages`: (group, page) that it touched; `slots`: the ones whose content it changed."""

    group: Group
    pages: set[tuple[int, int]]
    slots: list[int]
    requests: set[str]
    settled: bool
    at: float
    witness: Witnesses = field(default_factory=list)
    undo: Callable[[], None] | None = None
    fence: Fence | None = None


Fault = Callable[[Bench], Injection]


def _guarded(bench: Bench, group: Group, slots: list[int], act: Callable[[], None]) -> tuple[Witnesses, float]:
    """Act, and find which of some `slots` were settled before and behind; also when it was."""
    chosen = bench.rng.sample(slots, min(2, len(slots)))
    before = [bench.ask(group, slot) for slot in chosen]
    at = time.monotonic()
    act()
    after = [bench.ask(group, slot) for slot in chosen]
    return [
        (slot, first.generation)
        for slot, first, second in zip(chosen, before, after, strict=True)
        if _same(first, second)
    ], at


def _same(first: Guard, second: Guard) -> bool:
    return first.state == "settled" and second.state in STANDS and first.generation == second.generation


def _bytes_fault(bench: Bench, group: Group, slots: list[int], act: Callable[[], None]) -> Injection:
    pages = {(group.number, slot // group.page_size) for slot in slots}
    bench.avoid |= pages
    witness, at = _guarded(bench, group, slots, act)
    return Injection(
        group=group, pages=pages, slots=slots, requests=set(), settled=bool(witness), at=at, witness=witness
    )


def _noise(bench: Bench, old: bytearray) -> bytes:
    """Bytes that differ from `old` in every place."""
    return bytes(byte ^ bench.rng.randrange(1, 256) for byte in old)


# --- faults of bytes ------------------------------------------------------------------------------------------------


def _bit_flips(count: int) -> Fault:
    def fault(bench: Bench) -> Injection:
        group, slot = bench.pick_slot()
        offset, size = bench.pool.row_span(group, slot, bench.rng.randrange(bench.pool.parts(group)))

        def act() -> None:
            data = bench.pool.read(offset, size)
            # the ends of a slot are where a copy or a mask goes wrong by one
            ends = bench.rng.random() < 0.5
            bits = (
                [bench.rng.choice((0, size - 1)) * 8 + bit for bit in bench.rng.sample(range(8), count)]
                if ends
                else bench.rng.sample(range(8 * size), count)
            )
            for bit in bits:
                data[bit // 8] ^= 1 << bit % 8
            bench.pool.write(offset, data)

        return _bytes_fault(bench, group, [slot], act)

    return fault


def _word(bench: Bench) -> Injection:
    group, slot = bench.pick_slot()
    offset, size = bench.pool.row_span(group, slot, bench.rng.randrange(bench.pool.parts(group)))
    at = offset + 8 * bench.rng.randrange(size // 8)
    return _bytes_fault(bench, group, [slot], lambda: bench.pool.write(at, _noise(bench, bench.pool.read(at, 8))))


def _layer_row(bench: Bench) -> Injection:
    group, slot = bench.pick_slot()
    offset, size = bench.pool.row_span(group, slot, bench.rng.randrange(bench.pool.parts(group)))
    return _bytes_fault(
        bench, group, [slot], lambda: bench.pool.write(offset, _noise(bench, bench.pool.read(offset, size)))
    )


def _write_row(bench: Bench, group: Group, slot: int) -> Injection:
    """A whole token of other content, in all layers."""

    def act() -> None:
        for part in range(bench.pool.parts(group)):
            offset, size = bench.pool.row_span(group, slot, part)
            bench.pool.write(offset, _noise(bench, bench.pool.read(offset, size)))

    return _bytes_fault(bench, group, [slot], act)


def _padding_row(bench: Bench) -> Injection:
    group, slot = bench.pick_slot()
    return _write_row(bench, group, slot)


def _wrapped_slot(bench: Bench) -> Injection:
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


def _page_slots(group: Group, page: int) -> list[int]:
    return list(range(page * group.page_size, (page + 1) * group.page_size))


def _page(bench: Bench) -> Injection:
    group, slot = bench.pick_slot()
    page = slot // group.page_size
    offset, size = bench.pool.page_span(group, page)
    injection = _bytes_fault(
        bench, group, [slot], lambda: bench.pool.write(offset, _noise(bench, bench.pool.read(offset, size)))
    )
    injection.slots = _page_slots(group, page)
    return injection


def _stride_clear(bench: Bench) -> Injection:
    """A clear with a wrong stride: one layer's page of a neighbour becomes zero."""
    group, slot = bench.pick_slot()
    page = slot // group.page_size
    offset, size = bench.pool.layer_span(group, page, bench.rng.randrange(bench.pool.parts(group)))
    injection = _bytes_fault(bench, group, [slot], lambda: bench.pool.write(offset, bytes(size)))
    injection.slots = _page_slots(group, page)
    return injection


def _long_copy(bench: Bench) -> Injection:
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

    injection = _bytes_fault(bench, group, [slot], act)
    injection.slots = _page_slots(group, page)
    return injection


def _write_after_free(bench: Bench) -> Injection:
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


def _tokens_swapped(bench: Bench) -> Injection:
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

    injection = _bytes_fault(bench, group, [slot], act)
    injection.slots = [slot, other]
    return injection


# --- faults of tables -----------------------------------------------------------------------------------------------


def _lasting(bench: Bench, group: Group, *, mid_page: bool = False) -> list[tuple[str, list[int], int]]:
    """Requests that will run for a while and whose pages are not under another fault: (id, table, full pages).

    `mid_page`: they complete no page within the next steps. The engine hashes completed pages and would repair, or
    free, what a fault put into the table.
    """
    found = []
    for request_id, state in bench.running().items():
        table = group.allocator.block_table[request_id]
        full = max(0, state.position_offset - 1) // group.page_size
        free = all((group.number, page) not in bench.avoid for page in table)
        if mid_page and not 2 <= state.position_offset % group.page_size < group.page_size - 6:
            continue
        if full and free and bench.tokens_left(request_id) > _LEFT_TO_RUN and not state.remaining_prefill_tokens:
            found.append((request_id, table, full))
    return found


def _full_attention(bench: Bench) -> Group:
    for group in bench.groups:
        if not group.ring:
            return group
    raise NoTarget("there is no full attention")


def _table_fault(bench: Bench, group: Group, pages: list[int], change: Callable[[], None], fence: Fence) -> Injection:
    """`change` runs between steps; the fence takes it back. The witnesses are the first slots of the pages."""
    touched = {(group.number, page) for page in pages}
    bench.avoid |= touched
    slots = [page * group.page_size for page in pages if page >= group.first_page]

    def act() -> None:
        change()
        bench.fence(fence)

    witness, at = _guarded(bench, group, slots, lambda: bench.between_steps(act))
    return Injection(
        group=group,
        pages=touched,
        slots=[slot for page in pages for slot in _page_slots(group, page)],
        requests=set(fence.requests),
        settled=len(witness) == min(2, len(slots)),
        at=at,
        witness=witness,
        undo=lambda: bench.between_steps(lambda: bench.take_back(fence)),
        fence=fence,
    )


def _entry(table: list[int], index: int, expected: int, page: int) -> None:
    """Set an entry if it is still what it was when the fault was planned."""
    if index < len(table) and table[index] == expected:
        table[index] = page


def _table_swap(bench: Bench) -> Injection:
    """A page of one request and a page of another change places in the tables."""
    group = _full_attention(bench)

    def pick() -> tuple[str, list[int], str, list[int], int]:
        pairs = list(itertools.combinations(_lasting(bench, group), 2))
        bench.rng.shuffle(pairs)
        for (one, first, full), (two, second, other) in pairs:
            places = [i for i in range(min(full, other)) if first[i] != second[i]]
            if places:
                return one, first, two, second, bench.rng.choice(places)
        raise NoTarget("no two requests with full pages of their own")

    one, first, two, second, index = bench.between_steps(pick)
    a, b = first[index], second[index]

    def change() -> None:
        _entry(first, index, a, b)
        _entry(second, index, b, a)

    def back() -> None:
        _entry(first, index, b, a)
        _entry(second, index, a, b)

    return _table_fault(bench, group, [a, b], change, Fence(frozenset({one, two}), back))


def _duplicate_page(bench: Bench) -> Injection:
    """A request's table names one page twice."""
    group = _full_attention(bench)

    def pick() -> tuple[str, list[int], int, int]:
        for request_id, table, full in bench.rng.sample(found := _lasting(bench, group, mid_page=True), len(found)):
            if full >= 2:
                index, twin = bench.rng.sample(range(full), 2)
                return request_id, table, index, twin
        raise NoTarget("no request with two full pages")

    request_id, table, index, twin = bench.between_steps(pick)
    lost, kept = table[index], table[twin]
    return _table_fault(
        bench,
        group,
        [kept, lost],
        lambda: _entry(table, index, lost, kept),
        Fence(frozenset({request_id}), lambda: _entry(table, index, kept, lost), steps=2),
    )


def _reserved_page(bench: Bench) -> Injection:
    """A request's table names a page of the trash sectors."""
    group = _full_attention(bench)

    def pick() -> tuple[str, list[int], int]:
        found = _lasting(bench, group, mid_page=True)
        if not found:
            raise NoTarget("no request with a full page")
        request_id, table, full = bench.rng.choice(found)
        return request_id, table, bench.rng.randrange(full)

    request_id, table, index = bench.between_steps(pick)
    lost, trash = table[index], bench.rng.randrange(group.first_page)
    return _table_fault(
        bench,
        group,
        [lost, trash],
        lambda: _entry(table, index, lost, trash),
        Fence(frozenset({request_id}), lambda: _entry(table, index, trash, lost), steps=2),
    )


def _shared_page(bench: Bench) -> Injection:
    """The page that a request is filling is handed to another request as its next one."""
    group = _full_attention(bench)

    def pick() -> tuple[str, str, list[int], int]:
        found = _lasting(bench, group)
        bench.rng.shuffle(found)
        running = bench.running()
        for (owner, table, full), (thief, other, _) in itertools.permutations(found, 2):
            length = running[owner].position_offset - 1
            if full < len(table) and length % group.page_size >= 4:
                return owner, thief, other, table[full]
        raise NoTarget("no request with a page half full")

    owner, thief, table, page = bench.between_steps(pick)
    scheduler = bench.processor.scheduler

    def back() -> None:
        if page in table and page in group.allocator.block_table.get(owner, ()):
            table.remove(page)
        scheduler.set_request_cancellation(thief)
        scheduler.set_request_cancellation(owner)

    injection = _table_fault(bench, group, [page], lambda: table.append(page), Fence(frozenset({owner, thief}), back))
    injection.witness = []  # the other's writes raise the generation and are legal: who holds the page is the fault
    return injection


_stale = itertools.count()


def _stale_prefix(bench: Bench) -> Injection:
    """The prefix cache answers with a page that holds something else."""
    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
        compute_block_hash,
    )

    if not bench.cache.use_prefix_sharing:
        raise NoTarget("this engine shares no prefixes")
    group = _full_attention(bench)
    ledger = group.allocator.ledger
    prompt = [bench.rng.randrange(1, VOCABULARY) for _ in range(group.page_size + 5)]
    wrong = compute_block_hash(None, prompt[: group.page_size])
    request_id = f"stale-{next(_stale)}"

    def plant() -> int:
        pages = [page for page in ledger.block_to_hash if (group.number, page) not in bench.avoid]
        if not pages:
            raise NoTarget("no page is in the prefix cache")
        page = int(bench.rng.choice(pages))
        bench.avoid.add((group.number, page))
        return page

    page = bench.between_steps(plant)
    slots = [page * group.page_size + bench.rng.randrange(group.page_size)]

    def act() -> None:
        def register() -> None:
            if page not in ledger.block_to_hash:
                raise NoTarget("the page left the prefix cache")
            ledger.hash_to_block[wrong] = page

        bench.between_steps(register)
        bench.manager.add_request(prompt, request_id=request_id, max_new_tokens=_LEFT_TO_RUN)
        deadline = time.monotonic() + 3
        while request_id not in group.allocator.block_table and time.monotonic() < deadline:
            time.sleep(0.01)
        bench.between_steps(lambda: ledger.hash_to_block.pop(wrong, None))

    witness, at = _guarded(bench, group, slots, act)
    table = group.allocator.block_table.get(request_id)
    if not table or table[0] != page:
        raise NoTarget("the request did not hit the page")
    return Injection(
        group=group,
        pages={(group.number, page)},
        slots=_page_slots(group, page),
        requests={request_id},
        settled=bool(witness),
        at=at,
        witness=witness,
    )


# --- faults of a step's inputs --------------------------------------------------------------------------------------


def _input_fault(
    bench: Bench, buffer: str, eligible: Callable[[Any], range], change: Callable[[int], int]
) -> Injection:
    """Change one entry of the step's input buffers; `eligible` gives indices inside a request's chunk."""
    group = bench.rng.choice([group for group in bench.groups if not group.ring] or bench.groups)

    def attempt() -> tuple[str, int, float] | None:
        ios = bench.processor.inputs_and_outputs
        ios = ios.io_pairs[ios.current_pair].host_io if hasattr(ios, "io_pairs") else ios
        first = 0
        places = []
        for future in ios.requests_in_batch:
            start = future.state.position_offset - future.query_length
            places += [(str(future.state.request_id), first + i, int(start) + i) for i in eligible(future)]
            first += future.query_length
        if not places:
            return None
        request_id, index, position = bench.rng.choice(places)
        tensor = getattr(ios, buffer)
        tensor[index] = change(int(tensor[index]))
        if tensor.is_cuda:
            import torch

            torch.cuda.synchronize()
        return request_id, bench.slot_of(group, request_id, position), time.monotonic()

    request_id, slot, at = bench.behind_preparation(attempt)
    page = (group.number, slot // group.page_size)
    bench.avoid.add(page)
    # judged from what the step says, at its end: no stamp is needed
    return Injection(group=group, pages={page}, slots=[slot], requests={request_id}, settled=True, at=at)


def _own_tail(page_size: int) -> Callable[[Any], range]:
    """Prompt tokens in the prompt's last, unfinished page: no other request ever shares it, as it would share a wrong
    token's page in the prefix cache and spread the fault."""

    def eligible(future: Any) -> range:
        prompt = len(future.state.initial_tokens)
        start = future.state.position_offset - future.query_length
        first = max(0, prompt // page_size * page_size - start)
        return range(first, max(first, min(future.query_length, prompt - start)))

    return eligible


def _decoded(future: Any) -> range:
    return range(future.query_length if future.state.generated_tokens and future.query_length == 1 else 0)


def _token_off_by_one(bench: Bench) -> Injection:
    return _input_fault(
        bench, "input_ids", _own_tail(bench.groups[0].page_size), lambda token: (token + 1) % VOCABULARY
    )


def _position_off_by_one(bench: Bench) -> Injection:
    return _input_fault(bench, "position_ids", _decoded, lambda position: position + 1)


FAULTS: dict[str, Fault] = {
    "bit_flip_1": _bit_flips(1),
    "bit_flip_2": _bit_flips(2),
    "bit_flip_8": _bit_flips(8),
    "word": _word,
    "layer_row": _layer_row,
    "page": _page,
    "stride_clear": _stride_clear,
    "long_copy": _long_copy,
    "wrapped_slot": _wrapped_slot,
    "padding_row": _padding_row,
    "write_after_free": _write_after_free,
    "tokens_swapped": _tokens_swapped,
    "shared_page": _shared_page,
    "table_swap": _table_swap,
    "duplicate_page": _duplicate_page,
    "reserved_page": _reserved_page,
    "stale_prefix": _stale_prefix,
    "token_off_by_one": _token_off_by_one,
    "position_off_by_one": _position_off_by_one,
}
"""How each class of `canaryd.demo.classes` is injected."""

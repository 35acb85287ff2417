"""Faults of the engine's page tables and prefix cache. Each is taken back before it reaches the allocator."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from canaryd.demo.bench import Bench, Fence, NoTarget
from canaryd.demo.faults.injection import (
    LEFT_TO_RUN,
    Injection,
    guarded,
    page_slots,
)
from canaryd.demo.models import VOCABULARY
from canaryd.engines.transformers.geometry import Group


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
        if full and free and bench.tokens_left(request_id) > LEFT_TO_RUN and not state.remaining_prefill_tokens:
            found.append((request_id, table, full))
    return found


def full_attention(bench: Bench) -> Group:
    """The group whose pages are shared. Raises NoTarget if there is none."""
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

    witness, at = guarded(bench, group, slots, lambda: bench.between_steps(act))
    return Injection(
        group=group,
        pages=touched,
        slots=[slot for page in pages for slot in page_slots(group, page)],
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


def table_swap(bench: Bench) -> Injection:
    """A page of one request and a page of another change places in the tables."""
    group = full_attention(bench)

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


def duplicate_page(bench: Bench) -> Injection:
    """A request's table names one page twice."""
    group = full_attention(bench)

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


def reserved_page(bench: Bench) -> Injection:
    """A request's table names a page of the trash sectors."""
    group = full_attention(bench)

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


def shared_page(bench: Bench) -> Injection:
    """The page that a request is filling is handed to another request as its next one."""
    group = full_attention(bench)

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

    def back() -> None:
        if page in table and page in group.allocator.block_table.get(owner, ()):
            at = table.index(page)
            # a page of its own in the same place: what follows keeps its positions until the request has ended
            table[at : at + 1] = bench.fresh_pages(group)
        bench.end_request(thief)
        bench.end_request(owner)

    injection = _table_fault(bench, group, [page], lambda: table.append(page), Fence(frozenset({owner, thief}), back))
    injection.witness = []  # the other's writes raise the generation and are legal: who holds the page is the fault
    return injection


_stale = itertools.count()


def stale_prefix(bench: Bench) -> Injection:
    """The prefix cache answers with a page that holds something else."""
    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
        compute_block_hash,
    )

    if not bench.cache.use_prefix_sharing:
        raise NoTarget("this engine shares no prefixes")
    group = full_attention(bench)
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
        bench.manager.add_request(prompt, request_id=request_id, max_new_tokens=LEFT_TO_RUN)
        deadline = time.monotonic() + 3
        while request_id not in group.allocator.block_table and time.monotonic() < deadline:
            time.sleep(0.01)
        bench.between_steps(lambda: ledger.hash_to_block.pop(wrong, None))

    witness, at = guarded(bench, group, slots, act)
    table = group.allocator.block_table.get(request_id)
    if not table or table[0] != page:
        raise NoTarget("the request did not hit the page")
    return Injection(
        group=group,
        pages={(group.number, page)},
        slots=page_slots(group, page),
        requests={request_id},
        settled=bool(witness),
        at=at,
        witness=witness,
    )

"""A damaged block of a shared prefix, and what becomes of it in an engine that evicts."""

from __future__ import annotations

import time

from canaryd.demo.bench import Bench, NoTarget, Recovery
from canaryd.demo.faults.contents import bit_flips
from canaryd.demo.faults.injection import Injection
from canaryd.demo.faults.tables import full_attention

_FEWEST_READERS = 2


def shared_prefix(bench: Bench) -> Injection:
    """A flipped bit in a settled block that several requests read and new ones would hit; one at a time."""
    if any(each.recomputed_s is None for each in bench.recoveries):
        raise NoTarget("the last damaged prefix was not recomputed yet")
    group = full_attention(bench)
    ledger = group.allocator.ledger

    def pick() -> tuple[int, int]:
        shared = {
            page: hashed for page, hashed in ledger.block_to_hash.items() if (group.number, page) not in bench.avoid
        }
        read = [page for page in shared if len(bench.holders(group, page)) >= _FEWEST_READERS]
        if not read:
            raise NoTarget("no cached block has several readers")
        page = int(bench.rng.choice(read))
        return page, shared[page]

    page, content = bench.between_steps(pick)
    slot = page * group.page_size + bench.rng.randrange(group.page_size)
    if bench.ask(group, slot).state != "settled":
        raise NoTarget("the block is not settled")
    failed_before = bench.requests_evicted()
    injection = bit_flips(1, lambda: (group, slot))(bench)
    if injection.settled:
        injection.recovery = recovery = Recovery()
        bench.recoveries.append(recovery)

        def watch() -> bool:
            seconds = time.monotonic() - injection.at
            held = ledger.hash_to_block.get(content)
            if recovery.evicted_s is None:
                if held != page:
                    recovery.evicted_s, recovery.failed = seconds, bench.requests_evicted() - failed_before
            elif held is not None:
                recovery.recomputed_s = seconds
            return recovery.recomputed_s is not None

        bench.behind_each_preparation(watch)
    return injection

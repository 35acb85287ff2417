"""One fault, injected from the engine's side of memory at random places and times.

A fault says which pages and requests it touched and whether the daemon guarded the place: for faults of bytes and
tables a witness slot must have been settled, with the same content generation, right before and right behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from canaryd.demo.bench import Bench, Fence, Guard, Recovery
from canaryd.engines.transformers.geometry import Group

STANDS = ("settled", "suspect", "damaged")
"""States of a slot whose stamp was final when it was hit."""
LARGEST = 1000.0
"""Greatest magnitude of a number in injected bytes; attention over it stays finite in every dtype."""
LEFT_TO_RUN = 60
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
    recovery: Recovery | None = None


Fault = Callable[[Bench], Injection]


def guarded(bench: Bench, group: Group, slots: list[int], act: Callable[[], None]) -> tuple[Witnesses, float]:
    """Act, and find which of some `slots` were settled before and behind; also when it was."""
    chosen = bench.rng.sample(slots, min(2, len(slots)))
    before = [bench.ask(group, slot) for slot in chosen]
    at = time.monotonic()
    act()
    after = [bench.ask(group, slot) for slot in chosen]
    return [
        (slot, first.generation)
        for slot, first, second in zip(chosen, before, after, strict=True)
        if same(first, second)
    ], at


def same(first: Guard, second: Guard) -> bool:
    """Whether a slot was settled before, and is still the same content behind."""
    return first.state == "settled" and second.state in STANDS and first.generation == second.generation


def bytes_fault(bench: Bench, group: Group, slots: list[int], act: Callable[[], None]) -> Injection:
    """Change bytes with `act`, watching whether the daemon guarded the slots."""
    pages = {(group.number, slot // group.page_size) for slot in slots}
    bench.avoid |= pages
    witness, at = guarded(bench, group, slots, act)
    return Injection(
        group=group, pages=pages, slots=slots, requests=set(), settled=bool(witness), at=at, witness=witness
    )


def noise(bench: Bench, old: bytearray) -> bytearray:
    """Bytes that differ from `old` in nearly every place, as numbers no larger than `LARGEST`.

    What is not finite would spread: the engine writes NaN wherever such a token is read, for good in cached prefixes,
    and each of those slots is a finding of its own.
    """
    fresh = bytearray(byte ^ bench.rng.randrange(1, 256) for byte in old)
    size = bench.pool.dtype.itemsize
    for element in torch.nonzero(_wild(bench, fresh)).flatten().tolist():
        fresh[(element + 1) * size - 1] = 0  # the sign and most of the exponent
    return fresh


def is_tame(bench: Bench, data: bytearray) -> bool:
    """Whether the bytes are numbers no larger than `LARGEST`."""
    return not bool(_wild(bench, data).any())


def _wild(bench: Bench, data: bytearray) -> torch.Tensor:
    values = torch.frombuffer(data, dtype=bench.pool.dtype).float()
    return ~(values.abs() <= LARGEST)


def page_slots(group: Group, page: int) -> list[int]:
    """All slots of a page."""
    return list(range(page * group.page_size, (page + 1) * group.page_size))

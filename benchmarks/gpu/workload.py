"""What a row of the table is: work that can be launched, checked against the reference, and timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

Backend = Literal["triton", "reference"]

SEED = 20_261_201
"""Of every row's slots, tokens and content."""


class Workload(Protocol):
    """One row's work over `sets` buffer sets of equal shape, rotated so that none stays in the L2."""

    sets: int
    bytes_moved: int
    """Bytes one launch must move through device memory, in whole 32-byte sectors."""

    def launch(self, number: int, backend: Backend) -> None:
        """Enqueues the work of set `number`. On `triton` it can be captured in a CUDA graph."""
        ...

    def results(self, number: int) -> list[torch.Tensor]:
        """Everything that the work of set `number` wrote, rows of free order sorted."""
        ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a row's tensors are.

    Args:
        device: `cuda`, or `cpu` for a check under the interpreter.
        arena: uint8, random bytes that pools are views of; never written.
        seed: of everything that is drawn.
    """

    device: torch.device
    arena: torch.Tensor
    seed: int = SEED

    @classmethod
    def of(cls, device: str, arena_bytes: int) -> Place:
        """A place with an arena of its own."""
        generator = torch.Generator(device=device).manual_seed(SEED)
        words = torch.randint(
            -(1 << 63), (1 << 63) - 1, (arena_bytes // 8,), generator=generator, device=device, dtype=torch.int64
        )
        return cls(device=torch.device(device), arena=words.view(torch.uint8))

    def generator(self) -> torch.Generator:
        """A generator on the device, at the seed."""
        return torch.Generator(device=self.device).manual_seed(self.seed)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """A tensor of 0xA5 bytes."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        tensor.view(-1).view(torch.uint8).fill_(0xA5)
        return tensor

    def vector(self, values: list[int]) -> torch.Tensor:
        """int64 [n]."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a row must reach; the fields that are None do not count.

    Args:
        share: least share of the read ceiling, 0 to 1.
        micros: most microseconds.
        over_base: most time over the workload's `base`, as a share of it.
        below: name of a row whose time must be more.
    """

    share: float | None = None
    micros: float | None = None
    over_base: float | None = None
    below: str | None = None

    def text(self) -> str:
        """As the table prints it."""
        parts = []
        if self.share is not None:
            parts.append(f">= {self.share:.0%} of the ceiling")
        if self.micros is not None:
            parts.append(f"<= {self.micros:g} us")
        if self.over_base is not None:
            parts.append(f"within {self.over_base:.0%} of the digest alone")
        if self.below is not None:
            parts.append(f"less than '{self.below}'")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    Args:
        name: as printed; `--only` matches against it.
        build: (place, size) -> workload; the size is in slots, entries, tokens or rows, as the row says.
        size: what is timed.
        goal: what must be reached; an empty one is never missed.
        check_sizes: sizes of the bit-exact check; the interpreter runs the first one only.
        other_sizes: sizes that must compile nothing once the check has run; they differ in divisibility by 16, in width
            and in being 1, on which integer arguments specialise.
        beaten: microseconds of SGLang's kernel for the same work on an H200, where there is one.
        floor_us: a floor other than bytes over ceiling, such as a serial chain.
    """

    name: str
    build: Callable[[Place, int], Workload]
    size: int
    goal: Goal = field(default_factory=Goal)
    check_sizes: tuple[int, ...] = (5, 37)
    other_sizes: tuple[int, ...] = (1, 16, 53, 4097)
    beaten: float | None = None
    floor_us: float | None = None


def sorted_rows(rows: torch.Tensor, count: torch.Tensor) -> list[torch.Tensor]:
    """The listed rows in order of their columns, and the count; for lists whose order is free."""
    used = min(max(int(count), 0), rows.shape[0])
    listed = sorted(rows[:used].tolist())
    return [torch.tensor(listed, dtype=torch.int64), count.cpu()]

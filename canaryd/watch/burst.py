"""What the core hands to a backend, and what comes back: one burst per tick.

Runs of consecutive slots travel as page lists (CSR); the backend's plan kernel expands them to items. All arrays are
numpy int64 and C-contiguous; 64-bit hashes are carried in int64 (two's complement).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

NO_PREVIOUS = -1
"""`prev_slots` value: the run starts its chain (its first token's prev_hash must be the chain's head)."""
UNCHECKED_PREVIOUS = -2
"""`prev_slots` value: the predecessor is not known; the first item's chain link is not checked."""

FAIL_CHAIN = 1
FAIL_POSITION = 2
FAIL_TOKEN = 32
FAIL_RANGE = 64


@dataclass(frozen=True, kw_only=True)
class Runs:
    """k runs of consecutive positions.

    Item i of run r (0 <= i < lengths[r]) is slot `pages[page_offsets[r] + o // page_size] * page_size + o %
    page_size` with `o = first_offsets[r] + i`, at position `first_positions[r] + i`. Items are numbered through all
    runs in order: n = sum(lengths).

    Shapes: pages [P], page_offsets [k+1], first_offsets [k], lengths [k], first_positions [k].
    """

    pages: I64
    page_offsets: I64
    first_offsets: I64
    lengths: I64
    first_positions: I64

    @property
    def items(self) -> int:
        """Number of items in all runs."""
        return int(self.lengths.sum())


@dataclass(frozen=True, kw_only=True)
class StampWork:
    """Slots to read and stamp. tokens [n] (-1 unknown), generations [n], seeds [k] = prev_hash of each run's first
    item (the hash *before* its token)."""

    runs: Runs
    tokens: I64
    generations: I64
    seeds: I64


@dataclass(frozen=True, kw_only=True)
class CompareWork:
    """Stamped slots whose bytes are read and compared with their stamps."""

    runs: Runs


@dataclass(frozen=True, kw_only=True)
class LinkWork:
    """Rows whose stamps are compared with the row: token, position and chain link; no content is read.

    tokens [n] (-1: not known, not checked), prev_slots [k] = the slot before each run's first item, `NO_PREVIOUS` or
    `UNCHECKED_PREVIOUS`; heads [k] = the chain head (prev_hash at position 0) that holds where prev is `NO_PREVIOUS`.
    """

    runs: Runs
    tokens: I64
    prev_slots: I64
    heads: I64


@dataclass(frozen=True, kw_only=True)
class CopyWork:
    """Stamps that must have one digest and sum: sources [m], destinations [m]. No content is read."""

    sources: I64
    destinations: I64


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """One group's share of a burst; its stamps come first."""

    group: int
    stamps: StampWork | None = None
    compare: CompareWork | None = None
    links: LinkWork | None = None
    copies: CopyWork | None = None


@dataclass(frozen=True, kw_only=True)
class Burst:
    """All device work of one tick."""

    number: int
    works: tuple[GroupWork, ...]


@dataclass(frozen=True, kw_only=True)
class CompareMismatches:
    """items [m] index into the compare items; stored and seen digests and sums [m]. `truncated`: mismatches beyond
    the capacity that are not listed."""

    items: I64
    stored_digests: I64
    seen_digests: I64
    stored_sums: I64
    seen_sums: I64
    truncated: int = 0


@dataclass(frozen=True, kw_only=True)
class LinkMismatches:
    """items [m] index into the link items; bits [m] are `FAIL_*` combined."""

    items: I64
    bits: I64
    truncated: int = 0


@dataclass(frozen=True, kw_only=True)
class StampNotes:
    """items [m] index into the stamp items; bits [m] are `NOTE_*` of `canary_kernels.constants`, combined. `truncated`:
    items beyond the capacity that are not listed."""

    items: I64
    bits: I64
    truncated: int = 0


@dataclass(frozen=True, kw_only=True)
class CopyMismatches:
    """items [m] index into the copies whose stamps differ; what the source's stamp holds and the destination's, [m]."""

    items: I64
    source_digests: I64
    digests: I64
    source_sums: I64
    sums: I64


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """What one group's work found. `stamps` None: the backend takes no notes of stamps."""

    group: int
    compare: CompareMismatches | None = None
    links: LinkMismatches | None = None
    stamps: StampNotes | None = None
    copies: CopyMismatches | None = None


@dataclass(frozen=True, kw_only=True)
class BurstResult:
    """What a burst found, and what it cost. `busy_seconds` is device time (host time for host pools); `pieces` were
    launched one after the other."""

    number: int
    groups: tuple[GroupResult, ...]
    bytes_read: int = 0
    busy_seconds: float = 0.0
    pieces: int = 1
    launches: dict[str, int] = field(default_factory=dict)

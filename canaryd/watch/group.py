"""One group of an attachment: its spec, ledger and rows together."""

from __future__ import annotations

import numpy as np
from canary_kernels.chain import chain_hashes, chain_head
from canary_kernels.constants import mix
from canary_kernels.scheme import Scheme

from canaryd.watch.burst import I64
from canaryd.watch.counters import Counters
from canaryd.watch.ledger import Ledger
from canaryd.watch.rows import Rows
from canaryd.wire.messages import GroupSpec

_FEW_STEPS = 16
"""A serial chain of few long runs is computed faster by plain integers than by one tensor operation per step."""


class Group:
    """State of one group.

    Args:
        number: index in the attachment.
        spec: as announced.
        slot_bytes: bytes of one slot in all regions.
        scheme, chain_key: fingerprint of the attachment.
        counters: totals to add to.
    """

    def __init__(
        self, number: int, spec: GroupSpec, *, slot_bytes: int, scheme: Scheme, chain_key: int, counters: Counters
    ) -> None:
        self.number = number
        self.name = spec.name
        self.page_size = spec.page_size
        self.num_pages = spec.num_pages
        self.num_slots = spec.num_pages * spec.page_size
        self.holes_ok = spec.holes_ok
        self.ring = spec.ring
        self.slot_bytes = slot_bytes
        self.ledger = Ledger(spec.num_pages, spec.page_size, spec.reserved, counters)
        self.rows = Rows(spec.num_pages, spec.page_size, spec.ring)
        self._scheme: Scheme = scheme
        self._key = chain_key
        self._heads: dict[int, int] = {}

    def head(self, namespace: int) -> int:
        """Chain hash before a row's first token."""
        if namespace not in self._heads:
            if len(self._heads) >= 4096:
                self._heads.clear()
            self._heads[namespace] = chain_head(self._scheme, namespace)
        return self._heads[namespace]

    def chain(self, seeds: I64, tokens: I64, positions: I64, offsets: I64) -> tuple[I64, I64]:
        """Hash before and after each token of k runs, see `canary_kernels.chain.chain_hashes`."""
        if self._scheme == "sglang" and tokens.size > _FEW_STEPS * seeds.size:
            return _step_by_step(seeds, tokens, positions, offsets)
        return chain_hashes(self._scheme, seeds, tokens, positions, offsets, self._key)

    def pages_in_range(self, pages: I64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of `pages` [p] exist."""
        return (pages >= 0) & (pages < self.num_pages)


def _step_by_step(seeds: I64, tokens: I64, positions: I64, offsets: I64) -> tuple[I64, I64]:
    """`chain_hashes` of the sglang scheme, positions >= 0: the chain is serial, so this loops over tokens."""
    bounds = offsets.tolist()
    hashes = []
    for seed, first, last in zip(seeds.view(np.uint64).tolist(), bounds[:-1], bounds[1:], strict=True):
        state = seed
        for token, position in zip(
            tokens[first:last].view(np.uint64).tolist(), positions[first:last].tolist(), strict=True
        ):
            hashes.append(state)
            state = mix(mix(mix(state) ^ token) ^ position)
        hashes.append(state)
    through = np.array(hashes, dtype=np.uint64)
    index = np.arange(tokens.size) + np.repeat(np.arange(seeds.size), np.diff(offsets))
    before = through[index].view(np.int64)
    return before, through[index + 1].view(np.int64)

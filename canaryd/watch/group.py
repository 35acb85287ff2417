"""One group of an attachment: its spec, ledger and rows together."""

from __future__ import annotations

import numpy as np
from canary_kernels.chain import chain_head
from canary_kernels.scheme import Scheme

from canaryd.watch.burst import I64
from canaryd.watch.chains import Chains
from canaryd.watch.copies import Copies
from canaryd.watch.counters import Counters
from canaryd.watch.ledger import Ledger
from canaryd.watch.rows import Rows
from canaryd.wire.messages import GroupSpec


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
        self.copies = Copies(self.ledger)
        self.rows = Rows(spec.num_pages, spec.page_size, spec.ring, holes_ok=spec.holes_ok)
        self._scheme: Scheme = scheme
        self.chains = Chains(scheme, chain_key)
        self._heads: dict[int, int] = {}

    def head(self, namespace: int) -> int:
        """Chain hash before a row's first token."""
        if namespace not in self._heads:
            if len(self._heads) >= 4096:
                self._heads.clear()
            self._heads[namespace] = chain_head(self._scheme, namespace)
        return self._heads[namespace]

    def pages_in_range(self, pages: I64) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of `pages` [p] exist."""
        return (pages >= 0) & (pages < self.num_pages)

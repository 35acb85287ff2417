"""The verify kernel of the daemon's own path: do the slots hold what their row says they hold?"""

from __future__ import annotations

import torch

from canary_kernels.checks import check_findings, check_records, check_vectors
from canary_kernels.constants import signed
from canary_kernels.findings import Findings
from canary_kernels.items import ItemRuns, Items
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import links as reference
from canary_kernels.scheme import Scheme
from canary_kernels.validation import fail

LINK_FIELDS = 2
"""Columns of a links row: item, fail bits."""


def launch_links(
    *,
    records: torch.Tensor,
    runs: ItemRuns | None = None,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    out: Findings,
    page_size: int = 1,
    scheme: Scheme = "native",
    key: int = 0,
    item_base: int = 0,
    items: Items | None = None,
    backend: Backend | None = None,
) -> None:
    """Appends one row to `out` (width 2) per item of the runs whose record is not what its row expects.

    Bits: 1 chain, 2 position, 32 token, 64 slot out of range (or the run's given previous slot).

    - Records that were never stamped (negative position) are not judged, an out-of-range slot is.
    - Token: unchecked where the expected token is -1 or the record's is unknown (negative).
    - Chain: the record's prev_hash must be the hash after the record of the item before it; for a run's first item
      after that of `first_prev_slots`, or `heads` where that is -1. Unchecked where that slot is below -1 or the item
      before is out of range, or one of the two records is unknown or unstamped.

    Args:
        records: int64 [num_slots, 8].
        runs: k runs of items, see `ItemRuns`; they are expanded inside the kernel, no plan is written.
        tokens: int64 [n], n = item_offsets[k]; -1 unknown. An item behind the runs' end counts as out of range.
        heads: int64 [k], the hash before each run's first item.
        page_size: slots per page; each value compiles the kernel once.
        key: secret of the native chain, any 64-bit integer.
        item_base: added to the item numbers.
        items: in place of runs and page size, until the burst passes its runs: each item a run of its own.

    Raises:
        KernelArgumentError: an argument has a wrong dtype, shape, device or value.
    """
    if runs is None:
        if items is None:
            raise ValueError("links need runs or items")
        runs, heads = _single_items(items), heads[items.run_numbers]
    n = tokens.numel()
    k = runs.first_offsets.numel()
    check_records("links", records)
    check_vectors(
        "links",
        records,
        "records",
        {
            "pages": (runs.pages, None),
            "page_offsets": (runs.page_offsets, k + 1),
            "first_offsets": (runs.first_offsets, k),
            "item_offsets": (runs.item_offsets, k + 1),
            "first_positions": (runs.first_positions, k),
            "first_prev_slots": (runs.first_prev_slots, k),
            "tokens": (tokens, n),
            "heads": (heads, k),
        },
    )
    check_findings("links", out, LINK_FIELDS, records)
    if page_size < 1:
        fail("links", "page_size", "range", f"page_size must be positive, got {page_size}")
    if n == 0:
        return
    if k == 0:
        fail("links", "tokens", "length", f"tokens length must be 0 without runs, got {n}")
    if resolve_backend("links", backend, records) == "triton":
        import canary_kernels.device.links as kernels

        run = kernels.links
    else:
        run = reference.links
    with device_guard(records):
        run(
            records,
            runs,
            tokens,
            heads,
            out,
            page_size=page_size,
            scheme=scheme,
            key=signed(key),
            item_base=item_base,
        )
    record_launch("verify")


def _single_items(items: Items) -> ItemRuns:
    """One run per item, in a pool of pages of one slot."""
    ends = torch.arange(items.slots.numel() + 1, dtype=torch.int64, device=items.slots.device)
    return ItemRuns(
        pages=items.slots,
        page_offsets=ends,
        first_offsets=torch.zeros_like(items.slots),
        item_offsets=ends,
        first_positions=items.positions,
        first_prev_slots=items.prev_slots,
    )

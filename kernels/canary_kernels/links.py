"""The verify kernel of the daemon's own path: do the slots hold what their row says they hold?"""

from __future__ import annotations

import torch

from canary_kernels.checks import check_findings, check_records, check_vectors
from canary_kernels.constants import signed
from canary_kernels.findings import Findings
from canary_kernels.items import Items
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import links as reference
from canary_kernels.scheme import Scheme

LINK_FIELDS = 2
"""Columns of a links row: item, fail bits."""


def launch_links(
    *,
    records: torch.Tensor,
    items: Items,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    out: Findings,
    scheme: Scheme = "native",
    key: int = 0,
    item_base: int = 0,
    backend: Backend | None = None,
) -> None:
    """Appends one row to `out` (width 2) per item whose record is not what its row expects.

    Bits: 1 chain, 2 position, 32 token, 64 slot out of range (or the run's given previous slot, or the number of the
    run whose head is wanted).

    - Records that were never stamped are not judged, an out-of-range slot is.
    - Token: unchecked where the expected token is -1 or the record's is unknown (`CHAIN_UNKNOWN`).
    - Chain: the record's prev_hash must be `heads[run]` where prev_slot is -1, otherwise the hash after the previous
      slot's record; unchecked where prev_slot is -2, or one of the two records is unknown or unstamped.

    Args:
        records: int64 [num_slots, 8].
        items: slots, positions, prev_slots, run_numbers [n].
        tokens: int64 [n], -1 unknown.
        heads: int64 [k].
        key: secret of the native chain, any 64-bit integer.
        item_base: added to the item numbers.

    Raises:
        KernelArgumentError: an argument has a wrong dtype, shape or device.
    """
    n = items.slots.numel()
    check_records("links", records)
    check_vectors(
        "links",
        records,
        "records",
        {
            "slots": (items.slots, n),
            "positions": (items.positions, n),
            "prev_slots": (items.prev_slots, n),
            "run_numbers": (items.run_numbers, n),
            "tokens": (tokens, n),
            "heads": (heads, None),
        },
    )
    check_findings("links", out, LINK_FIELDS, records)
    if n == 0:
        return
    if resolve_backend("links", backend, records) == "triton":
        import canary_kernels.device.links as kernels

        run = kernels.links
    else:
        run = reference.links
    with device_guard(records):
        run(records, items, tokens, heads, out, scheme=scheme, key=signed(key), item_base=item_base)
    record_launch("verify")

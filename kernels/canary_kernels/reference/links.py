"""Comparing records with rows (token, position, chain link), in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from canary_kernels import records as fields
from canary_kernels.reference.chain import step
from canary_kernels.scheme import Scheme

if TYPE_CHECKING:
    from canary_kernels.findings import Findings
    from canary_kernels.items import Items

NO_PREVIOUS = -1
FAIL_CHAIN = 1
FAIL_POSITION = 2
FAIL_TOKEN = 32
FAIL_RANGE = 64


def links(
    records: torch.Tensor,
    items: Items,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    out: Findings,
    *,
    scheme: Scheme,
    key: int,
    item_base: int,
) -> None:
    """Appends the mismatches of `canary_kernels.links.launch_links`."""
    num_slots = records.shape[0]
    inside = (items.slots >= 0) & (items.slots < num_slots)
    record = records[torch.where(inside, items.slots, 0)]
    stamped = inside & ((record[:, fields.FLAGS] & fields.STAMPED) != 0)
    known = (record[:, fields.FLAGS] & fields.CHAIN_UNKNOWN) == 0

    wild_previous = items.prev_slots >= num_slots
    has_previous = (items.prev_slots >= 0) & ~wild_previous
    previous = records[torch.where(has_previous, items.prev_slots, 0)]
    usable = (previous[:, fields.FLAGS] & (fields.STAMPED | fields.CHAIN_UNKNOWN)) == fields.STAMPED
    linked = step(
        scheme,
        previous[:, fields.PREV_HASH],
        previous[:, fields.TOKEN],
        previous[:, fields.POSITION],
        key=key,
    )
    at_head = items.prev_slots == NO_PREVIOUS
    wild_run = at_head & ((items.run_numbers < 0) | (items.run_numbers >= heads.numel()))
    at_head &= ~wild_run
    expected = linked.clone()
    expected[at_head] = heads[items.run_numbers[at_head]]
    judged = stamped & known & (at_head | (has_previous & usable))

    bits = torch.where(judged & (record[:, fields.PREV_HASH] != expected), FAIL_CHAIN, 0)
    bits += torch.where(stamped & (record[:, fields.POSITION] != items.positions), FAIL_POSITION, 0)
    bits += torch.where(stamped & known & (tokens != -1) & (record[:, fields.TOKEN] != tokens), FAIL_TOKEN, 0)
    bits += torch.where(~inside | wild_previous | wild_run, FAIL_RANGE, 0)
    bad = bits.nonzero().squeeze(1)
    out.append(torch.stack([bad + item_base, bits[bad]], dim=1))

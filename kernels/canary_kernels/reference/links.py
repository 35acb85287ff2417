"""Comparing records with rows (token, position, chain link), in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from canary_kernels import records as fields
from canary_kernels.items import ItemRuns, Items
from canary_kernels.reference.chain import step
from canary_kernels.reference.items import plan_items
from canary_kernels.scheme import Scheme

if TYPE_CHECKING:
    from canary_kernels.findings import Findings

NO_PREVIOUS = -1
FAIL_CHAIN = 1
FAIL_POSITION = 2
FAIL_TOKEN = 32
FAIL_RANGE = 64


def links(
    records: torch.Tensor,
    runs: ItemRuns,
    tokens: torch.Tensor,
    heads: torch.Tensor,
    out: Findings,
    *,
    page_size: int,
    scheme: Scheme,
    key: int,
    item_base: int,
) -> None:
    """Appends the mismatches of `canary_kernels.links.launch_links`."""
    num_slots = records.shape[0]
    items = Items.allocate(tokens.numel(), records.device)
    plan_items(runs, items, num_pages=num_slots // page_size, page_size=page_size)
    inside = items.slots < num_slots
    record = records[torch.where(inside, items.slots, 0), : fields.LINK_FIELDS]
    token, position, prev_hash = record.unbind(1)
    stamped = inside & (position >= 0)
    known = token >= 0

    wild_previous = items.prev_slots >= num_slots
    has_previous = (items.prev_slots >= 0) & ~wild_previous
    previous = records[torch.where(has_previous, items.prev_slots, 0), : fields.LINK_FIELDS]
    previous_token, previous_position, previous_hash = previous.unbind(1)
    usable = has_previous & (previous_position >= 0) & (previous_token >= 0)
    linked = step(scheme, previous_hash, previous_token, previous_position, key=key)
    at_head = items.prev_slots == NO_PREVIOUS
    expected = torch.where(at_head, heads[items.run_numbers], linked)
    judged = stamped & known & (at_head | usable)

    bits = torch.where(judged & (prev_hash != expected), FAIL_CHAIN, 0)
    bits += torch.where(stamped & (position != items.positions), FAIL_POSITION, 0)
    bits += torch.where(stamped & known & (tokens != -1) & (token != tokens), FAIL_TOKEN, 0)
    bits += torch.where(~inside | wild_previous, FAIL_RANGE, 0)
    bad = bits.nonzero().squeeze(1)
    out.append(torch.stack([bad + item_base, bits[bad]], dim=1))

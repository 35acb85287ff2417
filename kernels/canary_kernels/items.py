"""The plan kernel of the daemon's own path: runs (page lists) become items (one slot each)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from canary_kernels.checks import check_vectors
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import items as reference
from canary_kernels.validation import fail


@dataclass(frozen=True, kw_only=True)
class ItemRuns:
    """k runs of consecutive positions on one device, all int64.

    Item i of run r is slot `pages[page_offsets[r] + o // page_size] * page_size + o % page_size` with
    `o = first_offsets[r] + i`, at position `first_positions[r] + i`; the runs' items follow each other, run r has
    [item_offsets[r], item_offsets[r+1]). Shapes: pages [P], page_offsets [k+1], first_offsets [k], item_offsets
    [k+1], first_positions [k], first_prev_slots [k] (the slot before each run's first item, or a negative mark).
    """

    pages: torch.Tensor
    page_offsets: torch.Tensor
    first_offsets: torch.Tensor
    item_offsets: torch.Tensor
    first_positions: torch.Tensor
    first_prev_slots: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Items:
    """n items, all int64 [n]: slot, position, slot of the item before it, and number of the run."""

    slots: torch.Tensor
    positions: torch.Tensor
    prev_slots: torch.Tensor
    run_numbers: torch.Tensor

    @classmethod
    def allocate(cls, count: int, device: torch.device) -> Items:
        """Uninitialised room for `count` items."""
        return cls(**{name: torch.empty(count, dtype=torch.int64, device=device) for name in cls.__annotations__})

    def head(self, count: int) -> Items:
        """Views of the first `count` items."""
        return Items(
            slots=self.slots[:count],
            positions=self.positions[:count],
            prev_slots=self.prev_slots[:count],
            run_numbers=self.run_numbers[:count],
        )


def launch_plan_items(
    *, runs: ItemRuns, out: Items, num_pages: int, page_size: int, backend: Backend | None = None
) -> None:
    """Expands `runs` to `out` (n = item_offsets[k] items).

    An item whose place in the page list, or whose page, is out of range gets slot 2^63-1, which no kernel
    dereferences; the item after it gets previous slot -2 (not checked). Number and lengths of runs never recompile.

    Raises:
        KernelArgumentError: an argument has a wrong dtype, shape, device or value.
    """
    k = runs.first_offsets.numel()
    n = out.slots.numel()
    check_vectors(
        "items",
        out.slots,
        "slots",
        {
            "pages": (runs.pages, None),
            "page_offsets": (runs.page_offsets, k + 1),
            "first_offsets": (runs.first_offsets, k),
            "item_offsets": (runs.item_offsets, k + 1),
            "first_positions": (runs.first_positions, k),
            "first_prev_slots": (runs.first_prev_slots, k),
            "slots": (out.slots, n),
            "positions": (out.positions, n),
            "prev_slots": (out.prev_slots, n),
            "run_numbers": (out.run_numbers, n),
        },
    )
    if n == 0:
        return
    if k == 0:
        fail("items", "slots", "length", f"slots length must be 0 without runs, got {n}")
    if resolve_backend("items", backend, out.slots) == "triton":
        import canary_kernels.device.items as kernels

        with device_guard(out.slots):
            kernels.plan_items(runs, out, num_pages=num_pages, page_size=page_size)
    else:
        reference.plan_items(runs, out, num_pages=num_pages, page_size=page_size)
    record_launch("plan")

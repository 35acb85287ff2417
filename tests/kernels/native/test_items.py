"""Runs become items: against the definition, with wild page lists."""

from __future__ import annotations

import pytest
import torch
from canary_kernels import OUT_OF_RANGE_SLOT, ItemRuns, Items, KernelArgumentError, launch_plan_items
from native_layouts import poisoned


def plan(backend, device, *, pages, page_offsets, first_offsets, lengths, first_positions, prevs, num_pages, page_size):
    def tensor(values):
        return torch.tensor(values, dtype=torch.int64, device=device)

    item_offsets = [0]
    for length in lengths:
        item_offsets.append(item_offsets[-1] + length)
    n = item_offsets[-1]
    out = Items(**{name: poisoned(n, device=device) for name in Items.__annotations__})
    launch_plan_items(
        runs=ItemRuns(
            pages=tensor(pages),
            page_offsets=tensor(page_offsets),
            first_offsets=tensor(first_offsets),
            item_offsets=tensor(item_offsets),
            first_positions=tensor(first_positions),
            first_prev_slots=tensor(prevs),
        ),
        out=out,
        num_pages=num_pages,
        page_size=page_size,
        backend=backend,
    )
    return list(
        zip(*(getattr(out, name).tolist() for name in ("slots", "positions", "prev_slots", "run_numbers")), strict=True)
    )


def oracle(*, pages, page_offsets, first_offsets, lengths, first_positions, prevs, num_pages, page_size):
    rows = []
    for run, length in enumerate(lengths):
        listed = pages[page_offsets[run] : page_offsets[run + 1]]
        previous = prevs[run]
        for nth in range(length):
            offset = first_offsets[run] + nth
            slot = OUT_OF_RANGE_SLOT
            if 0 <= offset < len(listed) * page_size and 0 <= listed[offset // page_size] < num_pages:
                slot = listed[offset // page_size] * page_size + offset % page_size
            rows.append((slot, first_positions[run] + nth, previous, run))
            previous = -2 if slot == OUT_OF_RANGE_SLOT else slot
    return rows


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("runs", [0, 1, 7, 40])
def test_items_are_the_definitions(page_size, runs, backend, device, generator, ran):
    def draw(low, high, count):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    counts = draw(0, 5, runs)
    page_offsets = [0]
    for count in counts:
        page_offsets.append(page_offsets[-1] + count)
    pages = draw(-1, 12, page_offsets[-1])
    for wild in (1 << 62, -(1 << 62), (1 << 63) - 1):
        if pages:
            pages[draw(0, len(pages), 1)[0]] = wild
    case = {
        "pages": pages,
        "page_offsets": page_offsets,
        "first_offsets": draw(-2, 2 * page_size, runs),
        "lengths": draw(0, 4 * page_size + 1, runs),
        "first_positions": draw(0, 1000, runs),
        "prevs": draw(-2, 50, runs),
        "num_pages": 11,
        "page_size": page_size,
    }
    got = plan(backend, device, **case)
    assert got == oracle(**case)
    assert (ran["plan_items_kernel"] > 0) == (backend == "triton" and bool(got))


def test_a_long_run_beside_many_short_ones(backend, device):
    case = {
        "pages": [*range(100), *range(300)],
        "page_offsets": [0, 100, *range(101, 401)],
        "first_offsets": [5] + [0] * 300,
        "lengths": [590] + [1] * 300,
        "first_positions": [5] + [9] * 300,
        "prevs": [-1] * 301,
        "num_pages": 400,
        "page_size": 6,
    }
    assert plan(backend, device, **case) == oracle(**case)


def test_items_without_runs_are_refused(backend):
    none, bounds = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    runs = ItemRuns(
        pages=none,
        page_offsets=bounds,
        first_offsets=none,
        item_offsets=bounds,
        first_positions=none,
        first_prev_slots=none,
    )
    out = Items.allocate(2, torch.device("cpu"))
    with pytest.raises(KernelArgumentError, match="kv-canary: slots length must be 0 without runs, got 2"):
        launch_plan_items(runs=runs, out=out, num_pages=1, page_size=1, backend=backend)
    launch_plan_items(runs=runs, out=out.head(0), num_pages=1, page_size=1, backend=backend)


def test_bad_runs_are_refused(backend):
    good = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelArgumentError, match="kv-canary: page_offsets length must be 3, got 2") as caught:
        launch_plan_items(
            runs=ItemRuns(
                pages=good,
                page_offsets=good,
                first_offsets=good,
                item_offsets=good,
                first_positions=good,
                first_prev_slots=good,
            ),
            out=Items.allocate(4, torch.device("cpu")),
            num_pages=1,
            page_size=1,
            backend=backend,
        )
    assert (caught.value.kernel, caught.value.argument, caught.value.check) == ("items", "page_offsets", "length")

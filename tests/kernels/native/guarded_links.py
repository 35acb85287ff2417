"""Launch the row links on tensors between protected pages; a program for `test_native_bounds.py`.

Usage: `guarded_links.py BACKEND SEED [beyond]`. One access outside any tensor ends the process with SIGSEGV. `beyond`
passes too short a tensor, to show that it would.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from canary_kernels import Findings, ItemRuns, allocate_records, launch_links
from test_links import SECRET, draw_table

from tests.kernels.contract.cases import HUGE
from tests.kernels.contract.guarded import Fence

ROUNDS = 12


def wild(rng, tensor):
    """The tensor with some of its values replaced by anything."""
    values = [rng.choice((rng.randrange(-3, 200), *HUGE)) if rng.random() < 0.2 else value for value in tensor.tolist()]
    return torch.tensor(values, dtype=torch.int64)


def run(fence, rng, backend):
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    page_size, num_pages = rng.choice((1, 3, 16)), rng.randrange(1, 20)
    table = draw_table(generator, page_size=page_size, num_pages=num_pages, runs=rng.choice((1, 5, 40)))
    records = fence.place(allocate_records(num_pages * page_size, torch.device("cpu")))
    records[:, :3] = torch.arange(records.shape[0])[:, None]
    rows = rng.choice((0, 3, 1000))
    out = Findings(
        rows=fence.memory(rows * 16).view(torch.int64).reshape(rows, 2), count=fence.place(torch.zeros(1).long())
    )
    plain = vars(table.runs("cpu"))
    # only kernels take offsets that nobody sorted; the reference's own search does not define their owners
    placed = {name: fence.place(wild(rng, tensor) if backend == "triton" else tensor) for name, tensor in plain.items()}
    tokens = fence.place(torch.tensor(table.tokens, dtype=torch.int64))
    heads = fence.place(torch.tensor(table.heads, dtype=torch.int64))
    launch_links(
        records=records,
        runs=ItemRuns(**placed),
        tokens=tokens,
        heads=heads,
        out=out,
        page_size=page_size,
        scheme=rng.choice(("native", "sglang")),
        key=SECRET,
        backend=backend,
    )
    if backend == "triton":
        enqueue(fence, rng, page_size, records, placed, tokens, heads, out)


def enqueue(fence, rng, page_size, records, placed, tokens, heads, out):
    """Counts that say anything."""
    from canary_kernels.device.links import enqueue_links

    def count():
        return fence.place(torch.tensor([rng.choice((rng.randrange(50), *HUGE))]))

    enqueue_links(
        records=records,
        runs=ItemRuns(**placed),
        run_count=count(),
        item_count=count(),
        tokens=tokens,
        heads=heads,
        out=out,
        page_size=page_size,
    )


def read_beyond(fence):
    """Three runs, of which only one has a first position: a lie that the launcher's checks would refuse."""
    from canary_kernels.device.links import enqueue_links

    table = draw_table(torch.Generator().manual_seed(0), page_size=1, num_pages=4, runs=1)
    table.add([0], [4])
    table.add([1], [5])
    runs = {**vars(table.runs("cpu")), "first_positions": fence.place(torch.zeros(1).long())}
    enqueue_links(
        records=allocate_records(4, torch.device("cpu")),
        runs=ItemRuns(**runs),
        run_count=torch.tensor([3]),
        item_count=torch.tensor([len(table.tokens)]),
        tokens=torch.tensor(table.tokens),
        heads=torch.zeros(3, dtype=torch.int64),
        out=Findings.allocate(capacity=1, width=2, device=torch.device("cpu")),
        page_size=1,
    )


def fenced_rounds(run, read_beyond):
    """Draws and runs, the fence behind and then before each tensor; argument "beyond" proves that the fence holds."""
    backend, seed = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    rng = random.Random(seed)
    for at_end in (True, False):
        fence = Fence(at_end=at_end)
        if sys.argv[3:] == ["beyond"]:
            read_beyond(fence)
        for _ in range(ROUNDS):
            run(fence, rng, backend)
    print(f"fenced {ROUNDS * 2} rounds")
    sys.stdout.flush()
    os._exit(0)  # tensors over fenced memory are gone with the process


if __name__ == "__main__":
    fenced_rounds(run, read_beyond)

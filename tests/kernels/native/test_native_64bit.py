"""Slots beyond 4 GiB and beyond 2^31 elements of 8 bytes: what is read and written is theirs, the last slot included.

One piece of memory of 16 GiB and a little serves every test. The expected values come from small tensors that hold the
same slots one behind the other, which no address can overflow. A small piece of host memory runs the same tests under
the interpreter, to prove the tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from canary_kernels import (
    COMPARE_FIELDS,
    LINK_FIELDS,
    STAMPED,
    DigestTable,
    Findings,
    GroupLayout,
    ItemRuns,
    Items,
    Region,
    Scheme,
    launch_compare,
    launch_digest,
    launch_links,
    launch_plan_items,
    launch_stamp,
)

KEY = 0x1234_5678_9ABC_DEF0
BEYOND = 1 << 20
RECORD_BYTES = 64
LINES = 5
WRAPS = (1 << 31, 1 << 32, 1 << 33, 1 << 34)
"""Bytes after which an offset in bytes, in int32 or in int64 elements wraps in 31 or 32 bits."""


@pytest.fixture(
    scope="module", params=[("cpu", 0), pytest.param(("cuda", 1 << 34), marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def memory(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    """Zeros, 1 MiB more than 2^31 elements of 8 bytes on a GPU."""
    device, size = request.param
    yield torch.zeros(size + BEYOND, dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()


def probes(count: int, step: int) -> list[int]:
    """Five slots of a pool of `count` slots, one per `step` bytes: the last two, one behind each wrap, and one low."""
    behind = [wrap // step + 3 for wrap in WRAPS if wrap // step + 3 < count - 2]
    return [count - 1, count - 2, *(behind[-2:] if len(behind) > 1 else (count // 2, count // 3)), 1]


def layout_of(memory: torch.Tensor, *, piece_bytes: int, pieces: int, slots: int | None = None) -> GroupLayout:
    """One region in pages of four slots, heads first; as many slots as fit, or `slots`."""
    page_stride = 4 * pieces * piece_bytes
    region = Region(
        memory=memory,
        offset=0,
        page_stride=page_stride,
        slot_stride=piece_bytes,
        piece_bytes=piece_bytes,
        pieces=pieces,
        piece_stride=4 * piece_bytes,
    )
    pages = memory.numel() // page_stride if slots is None else slots // 4
    return GroupLayout(regions=(region,), num_pages=pages, page_size=4)


def pieces_of(layout: GroupLayout, slot: int) -> list[torch.Tensor]:
    """Views of the slot's bytes."""
    (region,) = layout.regions
    first = slot // 4 * region.page_stride + slot % 4 * region.slot_stride
    starts = [first + piece * region.piece_stride for piece in range(region.pieces)]
    return [region.memory[start : start + region.piece_bytes] for start in starts]


@pytest.mark.parametrize(
    ("scheme", "piece_bytes", "pieces"),
    [("native", 64, 1), ("native", 72, 1), ("native", 132, 1), ("native", 16, 4), ("sglang", 64, 1)],
)
def test_digest(
    memory: torch.Tensor, generator: torch.Generator, scheme: Scheme, piece_bytes: int, pieces: int
) -> None:
    layout = layout_of(memory, piece_bytes=piece_bytes, pieces=pieces)
    slots = probes(layout.num_slots, pieces * piece_bytes)
    small = layout_of(torch.zeros(8 * pieces * piece_bytes, dtype=torch.uint8), piece_bytes=piece_bytes, pieces=pieces)
    for number, slot in enumerate(slots):
        for here, there in zip(pieces_of(small, number), pieces_of(layout, slot), strict=True):
            here.random_(generator=generator)
            there.copy_(here)
    got = _digests(layout, scheme, torch.tensor(slots, device=memory.device), "triton")
    wanted = _digests(small, scheme, torch.arange(LINES), "reference")
    for slot in slots:
        for piece in pieces_of(layout, slot):
            piece.zero_()
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.cpu(), other)


def _digests(layout: GroupLayout, scheme: Scheme, slots: torch.Tensor, backend: str) -> list[torch.Tensor]:
    digests, sums = torch.empty_like(slots), torch.empty_like(slots)
    tops = torch.empty((slots.numel(), 1), dtype=torch.uint8, device=slots.device)
    launch_digest(
        table=DigestTable(layout, scheme),
        slots=slots,
        digests_out=digests,
        sums_out=sums,
        region_bytes_out=tops,
        backend=backend,  # type: ignore[arg-type]
    )
    return [digests, sums, tops]


def records_in(memory: torch.Tensor) -> torch.Tensor:
    """The memory as records, all zero."""
    return memory.view(torch.int64).view(-1, 8)


def stamp(records: torch.Tensor, slots: list[int], generator: torch.Generator, backend: str) -> None:
    """Stamps one run over the slots; the records' content depends on the generator alone."""
    device = records.device
    columns = [torch.randint(1 << 40, (len(slots),), generator=generator).to(device) for _ in range(4)]
    tokens, generations, digests, sums = columns
    launch_stamp(
        records=records,
        slots=torch.tensor(slots, device=device),
        positions=torch.arange(len(slots), device=device),
        item_offsets=torch.tensor([0, len(slots)], device=device),
        seeds=torch.tensor([7], device=device),
        tokens=tokens,
        generations=generations,
        digests=digests,
        sums=sums,
        key=KEY,
        backend=backend,  # type: ignore[arg-type]
    )


def both_stamped(
    memory: torch.Tensor, slots: list[int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Records of the memory, `slots` stamped by the kernel, and those of the reference, one behind the other."""
    state = generator.get_state()
    stamp(records_in(memory), slots, generator, "triton")
    small = torch.zeros((len(slots), 8), dtype=torch.int64)
    generator.set_state(state)
    stamp(small, list(range(len(slots))), generator, "reference")
    return records_in(memory), small


def test_stamp(memory: torch.Tensor, generator: torch.Generator) -> None:
    slots = probes(memory.numel() // RECORD_BYTES, RECORD_BYTES)
    records, small = both_stamped(memory, slots, generator)
    written = records[slots].cpu()
    strays = [slot - wrap // RECORD_BYTES for slot in slots for wrap in WRAPS if slot >= wrap // RECORD_BYTES]
    stray = records[[slot for slot in strays if slot not in slots]].cpu()
    records[slots] = 0
    records[strays] = 0
    assert torch.equal(written, small)
    assert int(written[:, 6].min()) & STAMPED
    assert not stray.any()


def test_compare(memory: torch.Tensor, generator: torch.Generator) -> None:
    slots = probes(memory.numel() // RECORD_BYTES, RECORD_BYTES)
    records, small = both_stamped(memory, slots, generator)
    digests, sums = small[:, 3] ^ torch.tensor([1, 0, 1, 0, 0]), small[:, 4].clone()
    found = []
    for side, wanted, backend in ((records, slots, "triton"), (small, list(range(LINES)), "reference")):
        out = Findings.allocate(capacity=LINES, width=COMPARE_FIELDS, device=side.device)
        launch_compare(
            records=side,
            slots=torch.tensor(wanted, device=side.device),
            digests=digests.to(side.device),
            sums=sums.to(side.device),
            out=out,
            backend=backend,  # type: ignore[arg-type]
        )
        found.append(sorted(out.rows[: int(out.count)].tolist()))
    records[slots] = 0
    assert [row[0] for row in found[1]] == [0, 2]
    assert found[0] == found[1]


def test_links(memory: torch.Tensor, generator: torch.Generator) -> None:
    slots = probes(memory.numel() // RECORD_BYTES, RECORD_BYTES)
    records, small = both_stamped(memory, slots, generator)
    tokens = small[:, 0].clone()
    tokens[0] += 1
    found = []
    for side, pages, backend in ((records, slots, "triton"), (small, list(range(LINES)), "reference")):
        side[pages[2], 2] ^= 1  # the chain of the third
        out = Findings.allocate(capacity=LINES, width=LINK_FIELDS, device=side.device)
        launch_links(
            records=side,
            runs=_one_run(pages, side.device),
            tokens=tokens.to(side.device),
            heads=torch.tensor([7], device=side.device),
            out=out,
            key=KEY,
            backend=backend,  # type: ignore[arg-type]
        )
        found.append(sorted(out.rows[: int(out.count)].tolist()))
    records[slots] = 0
    assert found[0] == found[1]
    assert [0, 32] in found[0]
    assert [2, 1] in found[0]


def _one_run(pages: list[int], device: torch.device) -> ItemRuns:
    """One run from position 0 on, over pages of one slot."""
    ends = torch.tensor([0, len(pages)], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return ItemRuns(
        pages=torch.tensor(pages, device=device),
        page_offsets=ends,
        first_offsets=zero,
        item_offsets=ends,
        first_positions=zero,
        first_prev_slots=zero - 1,
    )


def test_plan(memory: torch.Tensor) -> None:
    """Page numbers whose slots need 45 bits; no memory stands behind them."""
    pages = [(1 << 41) - 1, (1 << 31) + 1, 1 << 28, 3, (1 << 32) - 1]
    runs, out = _one_run(pages, memory.device), Items.allocate(5 * 16, memory.device)
    runs.item_offsets[1] = 5 * 16
    launch_plan_items(runs=runs, out=out, num_pages=1 << 41, page_size=16, backend="triton")
    assert out.slots.tolist() == [page * 16 + offset for page in pages for offset in range(16)]

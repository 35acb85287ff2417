"""The NaN/Inf scan of the digest launcher against torch.isnan and torch.isinf."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from canary_kernels import (
    NONFINITE_RULES,
    DigestTable,
    GroupLayout,
    KernelArgumentError,
    Region,
    launch_digest,
)
from canary_kernels.constants import unsigned
from native_layouts import EVEN, NAMES, layout, poisoned, some_slots

BACKENDS = ["reference", "triton"]
FLOATS = {name: getattr(torch, name) for name in NONFINITE_RULES}
WIDTHS = {name: dtype.itemsize for name, dtype in FLOATS.items()}


def scan(group, slots, *, scheme="native", backend="reference"):
    """nonfinite_out as a list; the other outputs must be those of a launch without it."""
    n = slots.numel()
    table = DigestTable(group, scheme)
    outs = {"digests_out": poisoned(n), "sums_out": poisoned(n)}
    plain = {"digests_out": poisoned(n), "sums_out": poisoned(n)}
    found = poisoned(n, dtype=torch.uint8)
    tops, plain_tops = (poisoned(n, len(group.regions), dtype=torch.uint8) for _ in range(2))
    given = {"table": table, "slots": slots, "backend": backend}
    launch_digest(**given, **outs, region_bytes_out=tops, nonfinite_out=found)
    launch_digest(**given, **plain, region_bytes_out=plain_tops)
    assert all(torch.equal(outs[name], plain[name]) for name in outs)
    assert torch.equal(tops, plain_tops)
    again = poisoned(n, dtype=torch.uint8)
    launch_digest(**given, **plain, nonfinite_out=again)
    assert torch.equal(again, found)
    return found.tolist()


def flags(group, slots, backend):
    """nonfinite_out of one native launch."""
    found = poisoned(slots.numel(), dtype=torch.uint8)
    outs = {"digests_out": poisoned(slots.numel()), "sums_out": poisoned(slots.numel())}
    launch_digest(table=DigestTable(group), slots=slots, backend=backend, nonfinite_out=found, **outs)
    return found


def elements(group, region, slot):
    """The bytes of one slot in one region, as the region's dtype."""
    page, offset = divmod(slot, group.page_size)
    start = region.offset + page * region.page_stride + offset * region.slot_stride
    pieces = [region.memory[start + i * region.piece_stride :][: region.piece_bytes] for i in range(region.pieces)]
    return torch.cat(pieces).view(FLOATS[region.dtype])


def is_bad(values):
    """torch says whether any value is NaN or infinite; it cannot for two of the fp8 types itself."""
    wide = values.to(torch.float32)
    return bool((torch.isnan(wide) | torch.isinf(wide)).any())


def oracle(group, slot):
    if not 0 <= slot < group.num_slots:
        return 0
    known = [region for region in group.regions if region.dtype in FLOATS]
    return int(any(is_bad(elements(group, region, slot)) for region in known))


def group_of(values: torch.Tensor, dtype: str | None, *, lead: int = 0) -> GroupLayout:
    """Rows [slots, bytes] as one region that begins `lead` bytes into its memory."""
    slots, size = values.shape
    memory = torch.cat([torch.full((lead,), 0xFF, dtype=torch.uint8), values.reshape(-1)])
    row = Region(memory=memory, offset=lead, page_stride=size, slot_stride=0, piece_bytes=size, dtype=dtype)
    return GroupLayout(regions=(row,), num_pages=slots, page_size=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lane", [0, 3, 7, 9])
@pytest.mark.parametrize("dtype", [name for name in FLOATS if WIDTHS[name] < 4])
def test_every_bit_pattern_in_every_lane(dtype, lane, backend):
    """One slot of 12 bytes per pattern, the others ones; the last word has no upper half."""
    width = WIDTHS[dtype]
    patterns = torch.arange(1 << 8 * width, dtype=torch.int64)
    rows = torch.ones((patterns.numel(), 12 // width), dtype=torch.float32).to(FLOATS[dtype]).view(torch.uint8)
    at = lane // width * width
    for byte in range(width):
        rows[:, at + byte] = ((patterns >> 8 * byte) & 0xFF).to(torch.uint8)
    wide = rows[:, at : at + width].contiguous().view(FLOATS[dtype]).to(torch.float32).view(-1)
    wanted = (torch.isnan(wide) | torch.isinf(wide)).to(torch.uint8)
    assert 0 < wanted.sum() < patterns.numel()
    assert torch.equal(flags(group_of(rows, dtype, lead=4), patterns, backend), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_special_and_random(generator, backend):
    special = torch.tensor(
        [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x80000000,
         0x00000001, 0x807FFFFF, 0x3F800000, 0, 0x00007F80, 0x7F7F7F80],
    )  # fmt: skip
    bits = torch.cat([special, torch.randint(0, 1 << 32, (1000,), generator=generator)])
    finite = torch.rand((bits.numel(), 3), generator=generator).view(torch.int32)
    for lane in range(3):
        rows = finite.clone()
        rows[:, lane] = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
        wide = rows[:, lane].view(torch.float32)
        wanted = (torch.isnan(wide) | torch.isinf(wide)).to(torch.uint8).tolist()
        assert scan(group_of(rows.view(torch.uint8), "float32"), torch.arange(bits.numel()), backend=backend) == wanted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_odd_layouts(name, dtype, backend, generator):
    """Random bytes would be bad everywhere: all are made 1 first, then one element of some slots is not finite; the
    bytes between the regions stay random."""
    group = layout(name, generator)
    group = replace(group, regions=tuple(replace(region, dtype=dtype) for region in group.regions))
    for region in group.regions:
        for slot in range(group.num_slots):
            fill(group, region, slot, 1.0, slice(None))
    for number, region in enumerate(group.regions):
        for slot in range(number % 3, group.num_slots, 1 + 2 * len(group.regions)):
            count = region.slot_bytes // WIDTHS[dtype]
            fill(group, region, slot, float("nan"), [0, count - 1, count // 2][slot % 3])
    slots = some_slots(group, 40, generator)
    wanted = [oracle(group, slot) for slot in slots.tolist()]
    for scheme in ("native", "sglang") if name in EVEN else ("native",):
        assert scan(group, slots, scheme=scheme, backend=backend) == wanted


def fill(group, region, slot, value, which):
    """Writes `value` to elements of one slot in one region."""
    values = elements(group, region, slot)
    values[which] = value
    data = values.view(torch.uint8).view(region.pieces, region.piece_bytes)
    page, offset = divmod(slot, group.page_size)
    start = region.offset + page * region.page_stride + offset * region.slot_stride
    for piece in range(region.pieces):
        begin = start + piece * region.piece_stride
        region.memory[begin : begin + region.piece_bytes] = data[piece]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [None, "uint8", "int8", "float4_e2m1fn_x2"])
def test_other_dtypes_are_not_scanned(dtype, backend):
    rows = torch.full((3, 16), 0xFF, dtype=torch.uint8)
    assert scan(group_of(rows, dtype), torch.arange(3), backend=backend) == [0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_regions_are_scanned_by_their_own_dtype(backend, generator):
    """The byte 0x80 is a NaN in an fnuz region, and a negative zero in its neighbours."""
    group = layout("nhd", generator)
    for region in group.regions:
        region.memory.zero_()
    dtypes = ("float8_e4m3fn", None, "float8_e4m3fnuz")
    group = replace(
        group, regions=tuple(replace(region, dtype=dtype) for region, dtype in zip(group.regions, dtypes, strict=True))
    )
    for number, region in enumerate(group.regions):
        region.memory[region.offset + number * region.slot_stride] = 0x80
    assert scan(group, torch.arange(5), backend=backend) == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_slots_in_one_call(generator, backend):
    """More slots than any portion of the work holds."""
    rows = torch.zeros((6000, 64), dtype=torch.uint8)
    wanted = torch.randint(0, 2, (6000,), dtype=torch.uint8, generator=generator)
    rows[:, 63] = wanted * 0x7F
    rows[:, 62] = wanted * 0x80
    assert scan(group_of(rows, "bfloat16"), torch.arange(6000), backend=backend) == wanted.tolist()


def test_rules_agree_with_their_constants():
    rule = NONFINITE_RULES["bfloat16"]
    assert (rule.mask, rule.add, rule.top) == (0x7F807F807F807F80, 0x0080008000800080, 0x8000800080008000)
    rule = NONFINITE_RULES["float8_e5m2fnuz"]
    assert [rule.holds(unsigned(word)) for word in (0x80, 0x7F, 0x81, 0x8000, -1, 0, 1 << 63)] == [
        True, False, False, True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "check"),
    [
        (torch.zeros(4, dtype=torch.int64), "dtype"),
        (torch.zeros(5, dtype=torch.uint8), "length"),
        (torch.zeros((4, 1), dtype=torch.uint8), "shape"),
        (torch.zeros(8, dtype=torch.uint8)[::2], "contiguous"),
        (torch.zeros(4, dtype=torch.uint8, device="meta"), "device"),
    ],
)
def test_bad_outputs_are_refused(bad, check, generator):
    digests = poisoned(4)
    with pytest.raises(KernelArgumentError) as caught:
        launch_digest(
            table=DigestTable(layout("nhd", generator)),
            slots=torch.zeros(4, dtype=torch.int64),
            digests_out=digests,
            sums_out=poisoned(4),
            nonfinite_out=bad,
        )
    assert (caught.value.argument, caught.value.check) == ("nonfinite_out", check)
    assert torch.equal(digests, poisoned(4))

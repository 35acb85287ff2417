"""What `build_layouts` proves and refuses, and the described share."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from canaryd.errors import AttachRefused, RefusalReason
from canaryd.pool.regions import build_layouts, described_ratio
from canaryd.wire.messages import Attach, GroupSpec, HostShmMemory, Identity, RegionSpec


def region(**changes: Any) -> RegionSpec:
    values: dict[str, Any] = {
        "name": "k", "memory": 0, "offset": 0, "page_stride": 256, "slot_stride": 64, "piece_bytes": 32,
    }  # fmt: skip
    return RegionSpec(**(values | changes))


def group(*regions: RegionSpec, **changes: Any) -> GroupSpec:
    values: dict[str, Any] = {"name": "full", "num_pages": 4, "page_size": 4, "regions": list(regions)}
    return GroupSpec(**(values | changes))


def attach(*groups: GroupSpec, sizes: tuple[int, ...] = (1024,), **changes: Any) -> Attach:
    memories = [HostShmMemory(fd_index=number + 1, offset=0, size=size) for number, size in enumerate(sizes)]
    values: dict[str, Any] = {
        "identity": Identity(engine="e"), "engine_kind": "k", "engine_version": "1", "client_version": "1",
        "memories": memories, "groups": list(groups),
    }  # fmt: skip
    return Attach(**(values | changes))


def tensors(message: Attach) -> list[torch.Tensor]:
    return [torch.zeros(memory.size, dtype=torch.uint8) for memory in message.memories]


def refused(message: Attach, **options: Any) -> AttachRefused:
    with pytest.raises(AttachRefused) as error:
        build_layouts(message, tensors(message), **options)
    assert error.value.cause.endswith(".")
    assert error.value.remedy.endswith(".")
    return error.value


def test_layouts_stand_for_disjoint_regions() -> None:
    message = attach(
        group(region(dtype="bfloat16"), region(name="v", offset=32)),
        group(region(name="s", memory=1, page_stride=16, slot_stride=4, piece_bytes=4), name="scales"),
        sizes=(1024, 64),
    )
    mapped = tensors(message)
    layouts = build_layouts(message, mapped)
    assert [layout.slot_bytes for layout in layouts] == [64, 4]
    assert layouts[0].regions[1].memory.data_ptr() == mapped[0].data_ptr()
    assert layouts[0].regions[1].offset == 32
    assert [part.dtype for part in layouts[0].regions] == ["bfloat16", "uint8"]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        pytest.param({"offset": 36}, RefusalReason.OUT_OF_BOUNDS, id="one word too far"),
        pytest.param({"page_stride": 1 << 47}, RefusalReason.OUT_OF_BOUNDS, id="huge stride"),
        pytest.param({"memory": 1}, RefusalReason.OUT_OF_BOUNDS, id="no such memory"),
        pytest.param({"offset": 2}, RefusalReason.ALIGNMENT, id="offset"),
        pytest.param({"piece_bytes": 30}, RefusalReason.ALIGNMENT, id="piece"),
        pytest.param({"slot_stride": 62}, RefusalReason.ALIGNMENT, id="stride"),
        pytest.param({"slot_stride": 28}, RefusalReason.OVERLAP, id="slots share bytes"),
        pytest.param({"pieces": 2}, RefusalReason.OVERLAP, id="pieces share bytes"),
        pytest.param({"pieces": 2, "piece_stride": 64, "page_stride": 4}, RefusalReason.OVERLAP, id="pages"),
    ],
)
def test_bad_regions_are_refused(changes: dict[str, Any], refusal: RefusalReason) -> None:
    error = refused(attach(group(region(**changes))))
    assert error.refusal is refusal
    assert "k" in error.cause


def test_overlap_between_regions_names_both() -> None:
    error = refused(attach(group(region(), region(name="v", offset=28))))
    assert error.refusal is RefusalReason.OVERLAP
    assert "k and v" in error.cause


def test_overlap_is_seen_through_two_memories_of_the_same_bytes() -> None:
    message = attach(group(region(), region(name="v", memory=1)), sizes=(1024, 1024))
    shared = torch.zeros(1024, dtype=torch.uint8)
    with pytest.raises(AttachRefused) as error:
        build_layouts(message, [shared, shared])
    assert error.value.refusal is RefusalReason.OVERLAP
    build_layouts(message, tensors(message))


def test_groups_may_overlay_each_other() -> None:
    message = attach(group(region()), group(region(), name="sliding", page_size=2))
    assert len(build_layouts(message, tensors(message))) == 2


def test_unaligned_memory_is_refused() -> None:
    message = attach(group(region()))
    with pytest.raises(AttachRefused) as error:
        build_layouts(message, [torch.zeros(1026, dtype=torch.uint8)[2:]])
    assert error.value.refusal is RefusalReason.ALIGNMENT
    assert str(torch.zeros(4, dtype=torch.uint8).data_ptr())[:6] not in error.value.cause, "no addresses in texts"


@pytest.mark.parametrize("reserved", [[(0, 17)], [(15, 17)]])
def test_reserved_ranges_lie_inside(reserved: list[tuple[int, int]]) -> None:
    assert refused(attach(group(region(), reserved=reserved))).refusal is RefusalReason.OUT_OF_BOUNDS
    message = attach(group(region(), reserved=[(0, 4), (12, 16)]))
    build_layouts(message, tensors(message))


def test_device_tables_are_refused_with_a_remedy() -> None:
    error = refused(attach(group(region(), table="device")))
    assert error.refusal is RefusalReason.TABLE_KIND
    assert "announced" in error.remedy


def test_sglang_scheme_wants_multiples_of_16_bytes() -> None:
    odd = attach(group(region(piece_bytes=24)), scheme="sglang")
    assert refused(odd).refusal is RefusalReason.SCHEME
    assert refused(attach(group(region(piece_bytes=24))), scheme="sglang").refusal is RefusalReason.SCHEME
    build_layouts(attach(group(region(piece_bytes=24))), tensors(odd))
    build_layouts(attach(group(region()), scheme="sglang"), tensors(odd))


def test_contorted_regions_are_refused_as_such() -> None:
    wide = group(
        region(page_stride=4 * 100_003, slot_stride=4 * 100_003 * 1_000_000, piece_bytes=4),
        region(name="v", offset=8, page_stride=4 * 100_019, slot_stride=4 * 100_019 * 1_000_000, piece_bytes=4),
        num_pages=1_000_000,
        page_size=1,
    )
    message = attach(wide, sizes=(4 * 100_019 * 1_000_000 + 16,))
    memory = torch.empty(1, dtype=torch.uint8).expand(message.memories[0].size)
    with pytest.raises(AttachRefused) as error:
        build_layouts(message, [memory])
    assert error.value.refusal in (RefusalReason.LIMIT, RefusalReason.OVERLAP)


def test_described_ratio() -> None:
    assert described_ratio(attach(group(region()))) == 0.5
    assert described_ratio(attach(group(region(), region(name="v", offset=32)))) == 1.0
    two = attach(group(region()), group(region(memory=1), name="b"), sizes=(1024, 1024))
    assert described_ratio(two) == 0.5
    overlay = attach(group(region()), group(region(), name="b"))
    assert described_ratio(overlay) == 0.5


def test_layouts_never_leave_memory(seed: int) -> None:
    """Whatever is accepted, the kernels' own proof agrees; whatever leaves memory is refused."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(500):
        regions = [
            region(
                name=str(number),
                offset=4 * rng.randint(0, 40),
                page_stride=4 * rng.choice([16, 32, 64]),
                slot_stride=4 * rng.choice([4, 8, 16]),
                piece_bytes=4 * rng.randint(1, 4),
                pieces=rng.choice([1, 1, 2]),
                piece_stride=4 * rng.choice([0, 4, 8]),
            )
            for number in range(rng.randint(1, 2))
        ]
        message = attach(group(*regions, num_pages=rng.randint(1, 5), page_size=rng.randint(1, 4)))
        try:
            layouts = build_layouts(message, tensors(message))
        except AttachRefused:
            continue
        accepted += 1
        assert 0 < described_ratio(message) <= 1
        assert layouts[0].num_slots == message.groups[0].num_pages * message.groups[0].page_size
    assert accepted > 50

"""From the regions of an attachment to the layouts that the kernels use, with every proof they rely on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from canary_kernels.layout import GroupLayout, Region

from canaryd.errors import AttachRefused, RefusalReason
from canaryd.pool.overlap import Grid, OverlapProof, TooIrregular, grid
from canaryd.wire.messages import Attach, GroupSpec, RegionSpec

WORD_BYTES = 4
SGLANG_BYTES = 16
"""The `sglang` fold reads slots in pieces of 16 bytes."""


def build_layouts(
    attach: Attach, tensors: Sequence[torch.Tensor], *, scheme: Literal["native", "sglang"] | None = None
) -> list[GroupLayout]:
    """One layout per group, in the order of the attachment. Groups may overlay each other.

    Args:
        attach: the validated attach message.
        tensors: the mapped memories, 1-D uint8, in the order of the attachment.
        scheme: the fingerprint in force; None: the one that the attachment asks for.

    Raises AttachRefused: TABLE_KIND, OUT_OF_BOUNDS, ALIGNMENT, OVERLAP, SCHEME or LIMIT.
    """
    if len(tensors) != len(attach.memories):
        raise ValueError(f"{len(attach.memories)} memories are attached and {len(tensors)} mapped")
    return [_layout(group, tensors, scheme or attach.scheme) for group in attach.groups]


def _layout(group: GroupSpec, tensors: Sequence[torch.Tensor], scheme: str | None) -> GroupLayout:
    if group.table == "device":
        raise AttachRefused(
            RefusalReason.TABLE_KIND,
            f"Group {group.name} wants its rows read from a table on the device, which this version cannot do.",
            'Announce rows to the client and attach the group with table "announced".',
        )
    _check_reserved(group)
    for region in group.regions:
        _check_region(group, region, tensors, scheme)
    _check_overlap(group, tensors)
    return GroupLayout(
        regions=tuple(
            Region(
                memory=tensors[region.memory],
                offset=region.offset,
                page_stride=region.page_stride,
                slot_stride=region.slot_stride,
                piece_bytes=region.piece_bytes,
                pieces=region.pieces,
                piece_stride=region.piece_stride,
                dtype=region.dtype,
            )
            for region in group.regions
        ),
        num_pages=group.num_pages,
        page_size=group.page_size,
    )


def _check_reserved(group: GroupSpec) -> None:
    slots = group.num_pages * group.page_size
    for start, stop in group.reserved:
        if not 0 <= start < stop <= slots:
            raise AttachRefused(
                RefusalReason.OUT_OF_BOUNDS,
                f"Group {group.name} reserves slots {start} to {stop} of {slots}.",
                "Give reserved ranges as half-open ranges of slots inside the group.",
            )


def _check_region(group: GroupSpec, region: RegionSpec, tensors: Sequence[torch.Tensor], scheme: str | None) -> None:
    where = f"Region {region.name} of group {group.name}"
    if not 0 <= region.memory < len(tensors):
        raise AttachRefused(
            RefusalReason.OUT_OF_BOUNDS,
            f"{where} lies in memory {region.memory}, and {len(tensors)} are attached.",
            "Number memories from 0 in the order of the attachment.",
        )
    memory = tensors[region.memory]
    sizes = {
        "offset": region.offset,
        "page_stride": region.page_stride,
        "slot_stride": region.slot_stride,
        "piece_stride": region.piece_stride,
        "piece_bytes": region.piece_bytes,
        "the address of its memory": memory.data_ptr(),
    }
    for name, value in sizes.items():
        if value % WORD_BYTES:
            raise AttachRefused(
                RefusalReason.ALIGNMENT,
                f"{where}: {name} must be a multiple of {WORD_BYTES} bytes"
                + (f", got {value}." if name in RegionSpec.__struct_fields__ else "."),
                "Describe the region in whole 4-byte words, padding included, or leave it out.",
            )
    span = _grid(group, region, 0).span
    if region.offset + span > memory.numel():
        raise AttachRefused(
            RefusalReason.OUT_OF_BOUNDS,
            f"{where} ends at byte {region.offset + span} of memory {region.memory}, which has {memory.numel()}.",
            "Describe only bytes that the memory holds.",
        )
    if scheme == "sglang" and (region.pieces * region.piece_bytes) % SGLANG_BYTES:
        raise AttachRefused(
            RefusalReason.SCHEME,
            f"{where} has {region.pieces * region.piece_bytes} bytes per slot, and the sglang scheme reads multiples "
            f"of {SGLANG_BYTES}.",
            "Use the native scheme, or leave the region out.",
        )


def _check_overlap(group: GroupSpec, tensors: Sequence[torch.Tensor]) -> None:
    # real addresses: two memories of one attachment may be the same bytes
    grids = [_grid(group, region, tensors[region.memory].data_ptr()) for region in group.regions]
    try:
        pair = OverlapProof().find(grids)
    except TooIrregular:
        raise AttachRefused(
            RefusalReason.LIMIT,
            f"The regions of group {group.name} are so irregular that they cannot be proven not to overlap.",
            "Describe regions of one group with the same page stride, and pieces and slots that nest.",
        ) from None
    if pair is None:
        return
    first, second = (group.regions[number].name for number in pair)
    if pair[0] == pair[1]:
        cause = f"Region {first} of group {group.name} gives the same bytes to several slots or pieces."
    else:
        cause = f"Regions {first} and {second} of group {group.name} overlap."
    raise AttachRefused(
        RefusalReason.OVERLAP, cause, "Check offset, strides, pieces and page size against the layout of the pool."
    )


def _grid(group: GroupSpec, region: RegionSpec, base: int) -> Grid:
    return grid(
        base + region.offset,
        region.piece_bytes,
        [
            (region.page_stride, group.num_pages),
            (region.slot_stride, group.page_size),
            (region.piece_stride, region.pieces),
        ],
    )


def described_ratio(attach: Attach) -> float:
    """Share of the attached memory's bytes that regions describe, 0 to 1.

    Of groups that overlay each other in a memory only the one that describes most counts.
    """
    described = 0
    for number in range(len(attach.memories)):
        shares = sorted(share for group in attach.groups if (share := _share(group, number)) is not None)
        reach = 0
        most = 0
        for start, end, size in shares:
            if start >= reach:
                described += most
                most = 0
            most = max(most, size)
            reach = max(reach, end)
        described += most
    return min(1.0, described / sum(memory.size for memory in attach.memories))


def _share(group: GroupSpec, memory: int) -> tuple[int, int, int] | None:
    """First byte, end and described bytes of the group in one memory."""
    regions = [region for region in group.regions if region.memory == memory]
    if not regions:
        return None
    start = min(region.offset for region in regions)
    end = max(region.offset + _grid(group, region, 0).span for region in regions)
    size = sum(group.num_pages * group.page_size * region.pieces * region.piece_bytes for region in regions)
    return start, end, size

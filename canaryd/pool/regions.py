"""From the regions of an attachment to the layouts that the kernels use, with every proof they rely on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from canary_kernels.layout import GroupLayout, Region

from canaryd.wire.messages import Attach


def build_layouts(attach: Attach, tensors: Sequence[torch.Tensor]) -> list[GroupLayout]:
    """One layout per group, in the order of the attachment.

    Args:
        attach: the validated attach message.
        tensors: the mapped memories, 1-D uint8, in the order of the attachment.

    Raises AttachRefused for regions that leave their memory, overlap or are not aligned.
    """
    return [
        GroupLayout(
            regions=tuple(
                Region(
                    memory=tensors[region.memory],
                    offset=region.offset,
                    page_stride=region.page_stride,
                    slot_stride=region.slot_stride,
                    piece_bytes=region.piece_bytes,
                    pieces=region.pieces,
                    piece_stride=region.piece_stride,
                )
                for region in group.regions
            ),
            num_pages=group.num_pages,
            page_size=group.page_size,
        )
        for group in attach.groups
    ]


def described_ratio(attach: Attach) -> float:
    """Share of the attached memory's bytes that regions describe, 0 to 1."""
    total = sum(memory.size for memory in attach.memories)
    described = sum(
        group.num_pages * group.page_size * region.pieces * region.piece_bytes
        for group in attach.groups
        for region in group.regions
    )
    return min(1.0, described / total)

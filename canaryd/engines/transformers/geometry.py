"""Where transformers' continuous batching keeps KV: groups, pages, slots and regions of its one flat cache tensor.

Everything that depends on the shape of another package's objects is checked here, once, before anything is wrapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from canaryd.wire.messages import GroupSpec, RegionSpec

I64 = npt.NDArray[np.int64]

TRASH_SECTORS = 2
"""The first two sectors are never handed out: padding reads from the first and writes to the second."""

_PARTS: tuple[Literal["k", "v"], ...] = ("k", "v")

KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention")


class UnknownEngine(Exception):
    """The engine is not one that this adapter was checked with; the text is the sentence that is logged."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """One cache allocator as a group of slots.

    A page of the group is one block of the allocator (the pages of all its layers); slot `page * page_size + t`.

    Args:
        number: number of the group on the wire, which is the allocator's index.
        allocator: the engine's allocator.
        page_size: tokens per page.
        num_pages: blocks in the whole tensor, trash sectors included.
        pages_per_sector: blocks in one sector.
        block_stride: rows of the kernels' per-token view from one block to the next.
        ring: the sliding window, 0 for full attention.
    """

    number: int
    name: str
    allocator: Any
    page_size: int
    num_pages: int
    pages_per_sector: int
    block_stride: int
    ring: int

    @property
    def first_page(self) -> int:
        """The first page that is ever handed out."""
        return TRASH_SECTORS * self.pages_per_sector

    def slots_of_writes(self, index: I64) -> tuple[I64, npt.NDArray[np.bool_] | None]:
        """Slots that rows `index` of the kernels' per-token view are, and which of them to name.

        The mask leaves out rows in the trash sectors and rows that are no slot's (a wild index); None: all are slots.
        """
        page, offset = np.divmod(index, self.block_stride)
        good = (page >= self.first_page) & (page < self.num_pages) & (offset < self.page_size)
        slots = page * self.page_size + offset
        return slots, None if bool(good.all()) else good

    def slots_of_positions(self, pages: I64, positions: I64) -> I64:
        """Slots at which a row that holds `pages` keeps `positions`."""
        kept = positions % self.ring if self.ring else positions
        page, offset = np.divmod(kept, self.page_size)
        return pages[page] * self.page_size + offset

    def spec(self) -> GroupSpec:
        """The group as it is described to the daemon."""
        allocator = self.allocator
        row_bytes = allocator.num_key_value_heads * allocator.head_dim * allocator.cache_dtype.itemsize
        page_bytes = self.page_size * row_bytes
        regions = [
            RegionSpec(
                name=f"layer{layer}.{part}",
                memory=0,
                offset=(2 * i + side) * page_bytes,
                page_stride=self.block_stride * row_bytes,
                slot_stride=row_bytes,
                piece_bytes=row_bytes,
                dtype=str(allocator.cache_dtype).removeprefix("torch."),
                layer=layer,
                part=part,
            )
            for i, layer in enumerate(allocator.layer_indices)
            for side, part in enumerate(_PARTS)
        ]
        return GroupSpec(
            name=self.name,
            num_pages=self.num_pages,
            page_size=self.page_size,
            regions=regions,
            reserved=[(0, self.first_page * self.page_size)],
            ring=self.ring,
        )


_PROCESSOR_METHODS = ("prepare_next_batch", "_generation_step", "update_batch", "_update_tp_group_state", "warmup")
_ALLOCATOR_METHODS = ("free_blocks", "acquire_prefix_blocks", "fork_blocks", "mark_complete_blocks")


def _require(holder: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(holder, name)]
    if missing:
        raise UnknownEngine(
            f"canaryd leaves this engine alone: {type(holder).__name__} has no {', '.join(missing)}; "
            "the adapter knows transformers 5.18 to 5.24"
        )


def groups_of(processor: Any) -> list[Group]:
    """The groups of a `ContinuousBatchProcessor`, in the order of their index.

    Raises UnknownEngine if the processor is not shaped as the adapter knows it.
    """
    _require(processor, *_PROCESSOR_METHODS)
    _require(processor, "cache", "inputs_and_outputs", "scheduler", "offloading_manager", "model_runner")
    cache = processor.cache
    _require(cache, "cache_tensor", "cache_allocators", "pool", "bytes_per_sector", "num_sectors", "reset")
    _require(cache.pool, "free_blocks", "blocks_per_sector", "free_sectors")
    _require(processor.scheduler, "active_requests", "_requests_to_fork")
    _require(processor.offloading_manager, "restore_scheduled_requests")
    _require(processor.model_runner, "compute_batch")
    groups = [_group(cache, name, allocator) for name, allocator in cache.cache_allocators.items()]
    if [group.number for group in groups] != list(range(len(groups))):
        raise UnknownEngine("canaryd leaves this engine alone: its cache allocators are not numbered in order")
    return groups


def _group(cache: Any, name: str, allocator: Any) -> Group:
    if name not in KNOWN_LAYER_TYPES:
        raise UnknownEngine(f"canaryd leaves this engine alone: it does not know the cache of {name} layers")
    _require(allocator, *_ALLOCATOR_METHODS, "index", "layer_indices", "tokens_per_page", "bytes_per_block")
    _require(allocator, "block_physical_stride", "block_table", "blocks_per_sector", "ledger", "rows_per_token")
    _require(allocator, "num_key_value_heads", "head_dim", "cache_dtype")
    _require(allocator.ledger, "cached_blocks", "block_to_hash")
    page_size = allocator.tokens_per_page
    row_bytes = allocator.num_key_value_heads * allocator.head_dim * allocator.cache_dtype.itemsize
    total = cache.cache_tensor.numel() * cache.cache_tensor.element_size()
    stride = 2 * page_size * len(allocator.layer_indices)
    sectors = cache.num_sectors + TRASH_SECTORS
    if (
        allocator.rows_per_token != 2
        or allocator.block_physical_stride != stride
        or allocator.bytes_per_block != stride * row_bytes
        or allocator.blocks_per_sector * allocator.bytes_per_block != cache.bytes_per_sector
        or sectors * cache.bytes_per_sector != total
    ):
        raise UnknownEngine(f"canaryd leaves this engine alone: the {name} cache is not laid out as K and V pages")
    return Group(
        number=allocator.index,
        name=name,
        allocator=allocator,
        page_size=page_size,
        num_pages=sectors * allocator.blocks_per_sector,
        pages_per_sector=allocator.blocks_per_sector,
        block_stride=stride,
        ring=allocator.sliding_window if name == "sliding_attention" else 0,
    )

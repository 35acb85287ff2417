"""What a forward step really wrote: ids, positions and write indices as its kernels read them.

The host's lists say what the engine meant to write. The buffers that the kernels read are what was written, so they
are what is announced; on a GPU they are copied to pinned memory behind the forward, on its stream, because the next
step overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from canaryd.client.facts import Final
from canaryd.engines.transformers.geometry import I64, Group
from canaryd.engines.transformers.rows import Row

I32 = npt.NDArray[np.int32]


class Buffers:
    """Host memory that holds one step's inputs, as tensors to copy into and as arrays over the same memory: `inputs`
    [2, tokens] int32 (ids, positions), `index` [groups, tokens] int64, `table` [groups, requests, blocks] int32."""

    def __init__(self, *, groups: int, tokens: int, table_shape: tuple[int, ...], pinned: bool) -> None:
        self.inputs = torch.empty((2, tokens), dtype=torch.int32, pin_memory=pinned)
        self.index = torch.empty((groups, tokens), dtype=torch.int64, pin_memory=pinned)
        self.table = torch.empty(table_shape, dtype=torch.int32, pin_memory=pinned)
        self.inputs_array: I32 = self.inputs.numpy()
        self.index_array: I64 = self.index.numpy()
        self.table_array: I32 = self.table.numpy()


@dataclass(kw_only=True)
class Batch:
    """Rows of a step in its order, and how many tokens each has."""

    rows: list[Row]
    names: list[str]
    counts: I64
    counts_column: bytes

    @classmethod
    def of(cls, rows: list[Row], counts: list[int]) -> Batch:
        """A batch from the engine's own numbers."""
        array = np.array(counts, dtype=np.int64)
        return cls(rows=rows, names=[row.name for row in rows], counts=array, counts_column=array.tobytes())


@dataclass(kw_only=True)
class Step:
    """One captured step. `count` tokens; `by_table`: the kernel derived its writes from the block table."""

    batch: Batch
    count: int
    by_table: bool
    buffers: Buffers
    owner: StepReader = field(repr=False)

    def add_to(self, final: Final) -> None:
        """Name the step's writes. Call it when the copies into the buffers are complete."""
        batch, count = self.batch, self.count
        ids = self.buffers.inputs_array[0, :count].astype(np.int64)
        positions = self.buffers.inputs_array[1, :count].astype(np.int64)
        for group in self.owner.groups:
            if self.by_table:
                slots, named = self._slots_by_table(group, positions)
            else:
                slots, named = group.slots_of_writes(self.buffers.index_array[group.number, :count])
            if named is None:
                columns = (batch.counts_column, positions, ids, slots)
            else:
                row = np.repeat(np.arange(len(batch.names)), batch.counts)[named]
                counts = np.bincount(row, minlength=len(batch.names)).astype(np.int64)
                columns = (counts.tobytes(), positions[named], ids[named], slots[named])
            final.write(group.number, batch.names, *columns)
        self.owner.give_back(self.buffers)

    def _slots_by_table(self, group: Group, positions: I64) -> tuple[I64, npt.NDArray[np.bool_] | None]:
        """One token per request; the kernel looks its page up in the table, in units of one layer's pages."""
        table = self.buffers.table_array[group.number, : self.count].astype(np.int64)
        page, offset = np.divmod(positions, group.page_size)
        inside = (page >= 0) & (page < table.shape[1])
        entries = table[np.arange(self.count), np.where(inside, page, 0)]
        index = np.where(inside, entries * group.page_size + offset, -1)
        return group.slots_of_writes(index)


class StepReader:
    """Copies the inputs of steps into host buffers of its own.

    Args:
        groups: the engine's groups.
        ios: the engine's `ContinuousBatchingIOs` or `ContinuousBatchingAsyncIOs`.
    """

    def __init__(self, groups: Sequence[Group], ios: Any) -> None:
        self.groups = tuple(groups)
        self._ios = ios
        self._paired = hasattr(ios, "io_pairs")
        self._stream = ios.compute_stream
        self._spare: list[Buffers] = []

    def batch(self) -> Sequence[Any]:
        """The `FutureRequestState`s of the batch that was just prepared."""
        ios = self._ios.io_pairs[self._ios.current_pair].host_io if self._paired else self._ios
        batch: Sequence[Any] = ios.requests_in_batch
        return batch

    def read(self, batch: Batch) -> Step:
        """Copy the inputs of the step that was just launched. On a GPU the copies are queued behind it."""
        ios = self._ios.io_pairs[self._ios.current_pair].device_io if self._paired else self._ios
        count = int(ios.total_seqlen_q)
        by_table = bool(ios.use_block_table)
        buffers = self._spare.pop() if self._spare else self._allocate(ios)
        if self._stream is None:
            self._copy(ios, buffers, count, by_table, non_blocking=False)
        else:
            with torch.cuda.stream(self._stream):
                self._copy(ios, buffers, count, by_table, non_blocking=True)
        return Step(batch=batch, count=count, by_table=by_table, buffers=buffers, owner=self)

    def _copy(self, ios: Any, buffers: Buffers, count: int, by_table: bool, *, non_blocking: bool) -> None:
        buffers.inputs[0, :count].copy_(ios.input_ids[:count], non_blocking=non_blocking)
        buffers.inputs[1, :count].copy_(ios.position_ids[:count], non_blocking=non_blocking)
        for group in range(len(self.groups)):
            if by_table:
                buffers.table[group, :count].copy_(ios.block_table[group, :count], non_blocking=non_blocking)
            else:
                index = ios.write_index_storage[group, :count]
                buffers.index[group, :count].copy_(index, non_blocking=non_blocking)

    def _allocate(self, ios: Any) -> Buffers:
        return Buffers(
            groups=len(self.groups),
            tokens=ios.input_ids.shape[0],
            table_shape=tuple(ios.block_table.shape),
            pinned=self._stream is not None,
        )

    def give_back(self, buffers: Buffers) -> None:
        """The buffers may be used for another step."""
        self._spare.append(buffers)

    def event(self) -> torch.cuda.Event | None:
        """An event behind everything queued so far on the engine's stream; None without one."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait until everything queued on the engine's stream is complete."""
        if self._stream is not None:
            self._stream.synchronize()

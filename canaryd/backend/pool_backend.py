"""Runs bursts on one attachment's pool: device state, launches, results.

Host pools run the torch references, CUDA pools the Triton kernels on a stream of lowest priority; everything above the
launchers is the same code. Work larger than the scratch is cut into chunks, so that the memory in use does not depend
on the burst.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from canary_kernels.chain import chain_hashes
from canary_kernels.compare import COMPARE_FIELDS, launch_compare
from canary_kernels.digest import DigestTable, launch_digest
from canary_kernels.findings import Findings
from canary_kernels.items import ItemRuns, Items, launch_plan_items
from canary_kernels.launches import Backend
from canary_kernels.layout import GroupLayout
from canary_kernels.links import LINK_FIELDS, launch_links
from canary_kernels.locate import WordChange, locate_word_change
from canary_kernels.records import SlotRecord, allocate_records
from canary_kernels.scheme import Scheme
from canary_kernels.stamp import launch_stamp

from canaryd.backend.chunks import Chunk, cut
from canaryd.backend.staging import CudaStaging, HostStaging, Staging
from canaryd.errors import BackendError
from canaryd.watch.burst import (
    I64,
    NO_PREVIOUS,
    UNCHECKED_PREVIOUS,
    Burst,
    BurstResult,
    CompareMismatches,
    CompareWork,
    GroupResult,
    GroupWork,
    LinkMismatches,
    LinkWork,
    Runs,
    StampWork,
)

HOST_CHUNK_ITEMS = 8192
CUDA_CHUNK_ITEMS = 32768
FINDING_CAPACITY = 4096
"""Mismatches listed per compare or links work; the rest is counted in `truncated`."""
_STAGED_VECTORS = 10
"""Upper bound of the int64 vectors of one chunk, each at most one longer than its items."""


def is_device_error(error: Exception) -> bool:
    """Whether torch or Triton raises this for a device that failed, or for a kernel that could not be built for it (no
    compiler, no room for its cache)."""
    kinds = (RuntimeError, MemoryError, OSError, subprocess.SubprocessError)
    return isinstance(error, kinds) or type(error).__module__.startswith("triton.")


def make_backend(
    layouts: Sequence[GroupLayout],
    *,
    scheme: Scheme,
    key: int,
    backend: Backend | None = None,
    chunk_items: int | None = None,
    finding_capacity: int = FINDING_CAPACITY,
) -> PoolBackend:
    """The backend of one attachment.

    Args:
        layouts: one per group, all on one device, in group order.
        scheme: fingerprint scheme.
        key: secret of the native chain, any 64-bit integer.
        backend: None picks by device; "triton" forces the kernels, "reference" torch.
        chunk_items, finding_capacity: sizes of scratch and result lists, for tests.

    Raises:
        BackendError: device state could not be allocated.
        KernelArgumentError: the scheme cannot read a layout.
        ValueError: no layout, or layouts on several devices.
    """
    return PoolBackend(
        layouts,
        scheme=scheme,
        key=key,
        backend=backend,
        chunk_items=chunk_items,
        finding_capacity=finding_capacity,
    )


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """Result lists of one group work on the device, and their copies on the host."""

    compare: Findings
    links: Findings
    host_compare: Findings
    host_links: Findings


@dataclass(frozen=True, kw_only=True)
class _Pending:
    burst: Burst
    bytes_read: int
    launches: dict[str, int]
    busy: Callable[[], float]
    done: Callable[[], bool]


class PoolBackend:
    """Records, scratch and stream of one attachment. One burst at a time; not thread-safe."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        *,
        scheme: Scheme,
        key: int,
        backend: Backend | None,
        chunk_items: int | None,
        finding_capacity: int,
    ) -> None:
        if not layouts or any(layout.device != layouts[0].device for layout in layouts):
            raise ValueError("a backend needs at least one layout, all on one device")
        self.device = layouts[0].device
        self._layouts = tuple(layouts)
        self._scheme: Scheme = scheme
        self._key = key
        self._backend = backend
        self._capacity = finding_capacity
        self._pending: _Pending | None = None
        self._lists: list[_Lists] = []
        self._launches: Counter[str] = Counter()
        cuda = self.device.type == "cuda"
        self._chunk_items = chunk_items or (CUDA_CHUNK_ITEMS if cuda else HOST_CHUNK_ITEMS)
        self._tables = [DigestTable(layout, scheme) for layout in layouts]
        with self._device_errors():
            if not cuda:
                torch.set_num_threads(1)  # more would take the engine's cores
            self._stream = (
                torch.cuda.Stream(self.device, priority=0) if cuda else None  # type: ignore[no-untyped-call]  # 0 is lowest
            )
            with self._in_stream():
                self._staging: Staging = (
                    CudaStaging(_STAGED_VECTORS * (self._chunk_items + 2), self.device) if cuda else HostStaging()
                )
                self._records = [allocate_records(layout.num_slots, self.device) for layout in layouts]
                self._items = Items.allocate(self._chunk_items, self.device)
                self._digests = torch.empty(self._chunk_items, dtype=torch.int64, device=self.device)
                self._sums = torch.empty(self._chunk_items, dtype=torch.int64, device=self.device)

    def run(self, burst: Burst) -> BurstResult:
        """Runs a burst and waits for its result.

        Raises:
            BackendError: the device failed; nothing of the burst may be used.
        """
        self.start(burst)
        while (result := self.poll()) is None:
            time.sleep(0.0002)
        return result

    def start(self, burst: Burst) -> None:
        """Queues a burst: per group its stamps, then links, then compares.

        Raises:
            BackendError: the device failed, or the last burst's result was not fetched.
        """
        if not self._layouts:
            raise BackendError("the backend is closed")
        if self._pending is not None:
            raise BackendError(f"burst {self._pending.burst.number} is still running")
        self._launches.clear()
        bytes_read = 0
        with self._device_errors(), self._in_stream():
            began = time.perf_counter()
            start_event, end_event = self._events()
            if start_event is not None:
                start_event.record()
            while len(self._lists) < len(burst.works):
                self._lists.append(self._allocate_lists())
            for work, lists in zip(burst.works, self._lists, strict=False):
                bytes_read += self._queue(work, lists)
            if start_event is None or end_event is None:
                seconds = time.perf_counter() - began
                busy, done = (lambda: seconds), (lambda: True)
            else:
                end_event.record()
                first, last = start_event, end_event
                busy, done = (lambda: first.elapsed_time(last) / 1000), last.query
        self._pending = _Pending(
            burst=burst, bytes_read=bytes_read, launches=dict(self._launches), busy=busy, done=done
        )

    def poll(self) -> BurstResult | None:
        """The result of the burst started last, or None while the device still works on it. Never blocks.

        Raises:
            BackendError: the device failed, or no burst was started.
        """
        pending = self._pending
        if pending is None:
            raise BackendError("no burst was started")
        with self._device_errors():
            try:
                if not pending.done():
                    return None
            except BaseException:
                self._pending = None  # it will never be done
                raise
            self._pending = None
            return BurstResult(
                number=pending.burst.number,
                groups=tuple(
                    self._result(work, lists) for work, lists in zip(pending.burst.works, self._lists, strict=False)
                ),
                bytes_read=pending.bytes_read,
                busy_seconds=pending.busy(),
                launches=pending.launches,
            )

    def slot_record(self, group: int, slot: int) -> SlotRecord:
        """The record of one slot, for findings and debugging; on a GPU waits for the stream.

        Raises:
            BackendError: the device failed.
            IndexError: no such group or slot.
        """
        if not 0 <= slot < self._layouts[group].num_slots:
            raise IndexError(f"group {group} has no slot {slot}")
        with self._device_errors(), self._in_stream():
            values = self._records[group][slot].tolist()
        return SlotRecord(**dict(zip(SlotRecord.__annotations__, values, strict=True)))

    def locate(self, group: int, slot: int, *, stored_digest: int, stored_sum: int) -> WordChange | None:
        """The one word of the slot that changed since the stamp with this digest and sum, by reading the slot now; None
        if none or several did, or in scheme sglang, whose fold does not allow it.

        Raises:
            BackendError: the device failed.
            IndexError: no such group or slot.
        """
        if self._scheme != "native":
            return None
        with self._device_errors(), self._in_stream():
            return locate_word_change(self._layouts[group], slot, stored_digest=stored_digest, stored_sum=stored_sum)

    def close(self) -> None:
        """Waits for work in flight and drops all device state; the pool's memory may be unmapped afterwards.

        Raises:
            BackendError: the device failed; the state is dropped all the same.
        """
        try:
            with self._device_errors():
                if self._stream is not None:
                    self._stream.synchronize()
        finally:  # a failed device too: nothing may hold the pool's memory any longer
            self._pending = None
            self._records.clear()
            self._tables.clear()
            self._lists.clear()
            self._layouts = ()

    # --- queueing -----------------------------------------------------------------------------------------------

    def _queue(self, work: GroupWork, lists: _Lists) -> int:
        """Queues one group's work and the copies of its results; returns the bytes that it reads from the pool."""
        count = 0
        if work.stamps is not None:
            count += self._queue_stamps(work.group, work.stamps)
        if work.links is not None:
            self._queue_links(work.group, work.links, lists)
        if work.compare is not None:
            count += self._queue_compare(work.group, work.compare, lists)
        return count * self._layouts[work.group].slot_bytes

    def _queue_stamps(self, group: int, work: StampWork) -> int:
        layout = self._layouts[group]
        carried: int | None = None
        count = 0
        for chunk in cut(work.runs, page_size=layout.page_size, capacity=self._chunk_items):
            own = slice(chunk.first_item, chunk.first_item + chunk.count)
            seeds = work.seeds[chunk.run_index]
            if chunk.continues and carried is not None:
                seeds[0] = carried
            previous = np.full(seeds.size, UNCHECKED_PREVIOUS, dtype=np.int64)
            staged = self._stage(chunk, previous, [seeds, work.tokens[own], work.generations[own]])
            items, runs, (seeds_d, tokens, generations) = self._plan(group, chunk, staged)
            digests, sums = self._digest(group, items)
            launch_stamp(
                records=self._records[group],
                slots=items.slots,
                positions=items.positions,
                item_offsets=runs.item_offsets,
                seeds=seeds_d,
                tokens=tokens,
                generations=generations,
                digests=digests,
                sums=sums,
                scheme=self._scheme,
                key=self._key,
                backend=self._backend,
            )
            self._launches["write"] += 1
            self._staging.release()
            count += chunk.count
            if count < work.tokens.size:
                carried = self._hash_after(layout, chunk, int(seeds[-1]), work.tokens[own])
        return count

    def _hash_after(self, layout: GroupLayout, chunk: Chunk, seed: int, tokens: I64) -> int:
        """The chain hash after the last run's items of this chunk: the seed of its rest in the next one."""
        last = chunk.run_index.size - 1
        slots = chunk.slots_of_run(last, num_pages=layout.num_pages, page_size=layout.page_size)
        positions = chunk.runs.first_positions[last] + np.arange(slots.size, dtype=np.int64)
        _, after = chain_hashes(
            self._scheme,
            np.array([seed], dtype=np.int64),
            tokens[chunk.item_offsets[last] :],
            np.where(slots < layout.num_slots, positions, -1),
            np.array([0, slots.size], dtype=np.int64),
            self._key,
        )
        return int(after[-1])

    def _queue_links(self, group: int, work: LinkWork, lists: _Lists) -> None:
        layout = self._layouts[group]
        lists.links.reset()
        carried = UNCHECKED_PREVIOUS
        for chunk in cut(work.runs, page_size=layout.page_size, capacity=self._chunk_items):
            own = slice(chunk.first_item, chunk.first_item + chunk.count)
            previous = work.prev_slots[chunk.run_index]
            if chunk.continues:
                previous[0] = carried
            staged = self._stage(chunk, previous, [work.tokens[own], work.heads[chunk.run_index]])
            items, _, (tokens, heads) = self._plan(group, chunk, staged)
            launch_links(
                records=self._records[group],
                items=items,
                tokens=tokens,
                heads=heads,
                out=lists.links,
                scheme=self._scheme,
                key=self._key,
                item_base=chunk.first_item,
                backend=self._backend,
            )
            self._launches["verify"] += 1
            self._staging.release()
            last = int(
                chunk.slots_of_run(chunk.run_index.size - 1, num_pages=layout.num_pages, page_size=layout.page_size)[-1]
            )
            carried = last if last < layout.num_slots else UNCHECKED_PREVIOUS
        self._fetch(lists.links, lists.host_links)

    def _queue_compare(self, group: int, work: CompareWork, lists: _Lists) -> int:
        layout = self._layouts[group]
        lists.compare.reset()
        count = 0
        for chunk in cut(work.runs, page_size=layout.page_size, capacity=self._chunk_items):
            previous = np.full(chunk.run_index.size, NO_PREVIOUS, dtype=np.int64)
            items, _, _ = self._plan(group, chunk, self._stage(chunk, previous, []))
            digests, sums = self._digest(group, items)
            launch_compare(
                records=self._records[group],
                slots=items.slots,
                digests=digests,
                sums=sums,
                out=lists.compare,
                item_base=chunk.first_item,
                backend=self._backend,
            )
            self._launches["compare"] += 1
            self._staging.release()
            count += chunk.count
        self._fetch(lists.compare, lists.host_compare)
        return count

    def _stage(self, chunk: Chunk, previous: I64, extra: list[I64]) -> list[torch.Tensor]:
        runs: Runs = chunk.runs
        return self._staging.upload(
            [
                runs.pages,
                runs.page_offsets,
                runs.first_offsets,
                chunk.item_offsets,
                runs.first_positions,
                previous,
                *extra,
            ]
        )

    def _plan(self, group: int, chunk: Chunk, staged: list[torch.Tensor]) -> tuple[Items, ItemRuns, list[torch.Tensor]]:
        layout = self._layouts[group]
        pages, page_offsets, first_offsets, item_offsets, first_positions, previous, *extra = staged
        runs = ItemRuns(
            pages=pages,
            page_offsets=page_offsets,
            first_offsets=first_offsets,
            item_offsets=item_offsets,
            first_positions=first_positions,
            first_prev_slots=previous,
        )
        items = self._items.head(chunk.count)
        launch_plan_items(
            runs=runs, out=items, num_pages=layout.num_pages, page_size=layout.page_size, backend=self._backend
        )
        self._launches["plan"] += 1
        return items, runs, extra

    def _digest(self, group: int, items: Items) -> tuple[torch.Tensor, torch.Tensor]:
        count = items.slots.numel()
        digests, sums = self._digests[:count], self._sums[:count]
        launch_digest(
            table=self._tables[group],
            slots=items.slots,
            digests_out=digests,
            sums_out=sums,
            backend=self._backend,
        )
        self._launches["digest"] += 1
        return digests, sums

    # --- results ------------------------------------------------------------------------------------------------

    def _allocate_lists(self) -> _Lists:
        compare = Findings.allocate(capacity=self._capacity, width=COMPARE_FIELDS, device=self.device)
        links = Findings.allocate(capacity=self._capacity, width=LINK_FIELDS, device=self.device)
        if self.device.type != "cuda":
            return _Lists(compare=compare, links=links, host_compare=compare, host_links=links)
        return _Lists(
            compare=compare,
            links=links,
            host_compare=Findings.allocate_pinned(capacity=self._capacity, width=COMPARE_FIELDS),
            host_links=Findings.allocate_pinned(capacity=self._capacity, width=LINK_FIELDS),
        )

    def _fetch(self, source: Findings, target: Findings) -> None:
        if source is not target:
            target.count.copy_(source.count, non_blocking=True)
            target.rows.copy_(source.rows, non_blocking=True)

    def _result(self, work: GroupWork, lists: _Lists) -> GroupResult:
        compare: CompareMismatches | None = None
        links: LinkMismatches | None = None
        if work.compare is not None:
            columns, truncated = _columns(lists.host_compare)
            compare = CompareMismatches(
                items=columns[0],
                stored_digests=columns[1],
                seen_digests=columns[2],
                stored_sums=columns[3],
                seen_sums=columns[4],
                truncated=truncated,
            )
        if work.links is not None:
            columns, truncated = _columns(lists.host_links)
            links = LinkMismatches(items=columns[0], bits=columns[1], truncated=truncated)
        return GroupResult(group=work.group, compare=compare, links=links)

    # --- the device ---------------------------------------------------------------------------------------------

    def _events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | tuple[None, None]:
        if self._stream is None:
            return None, None
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return first, last

    def _in_stream(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _device_errors(self) -> Iterator[None]:
        """Turns what torch and Triton raise for a failed device into BackendError."""
        try:
            yield
        except Exception as error:
            if is_device_error(error):
                raise BackendError(f"{type(error).__name__}: {error}") from error
            raise


def _columns(findings: Findings) -> tuple[list[I64], int]:
    """Columns of the listed rows in item order, and how many were not listed."""
    total = int(findings.count)
    rows = findings.rows[: min(total, findings.rows.shape[0])].numpy()
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return [np.ascontiguousarray(column) for column in rows.T], total - rows.shape[0]

"""Bursts by the Triton kernels: on a GPU one CUDA graph, replayed with other sizes each time.

All sizes are read from device memory. The host packs a burst's work list into one page-locked buffer; the graph's first
node sends it on, and what the compares and links find is written to page-locked memory. So a burst costs the host the
packing and one launch. There is one graph per size class of the list, each with the same kernels. Under the interpreter
these run one by one.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from canary_kernels.device.worklist import enqueue_hand_back
from canary_kernels.digest import DigestTable
from canary_kernels.launches import record_launch
from canary_kernels.layout import GroupLayout
from canary_kernels.scheme import Scheme
from canary_kernels.worklist import WorkList

from canaryd.backend.burst_kernels import SEGMENTS, SIZES, GroupKernels, Scratch, segment_capacities
from canaryd.backend.pieces import Cutter, Limits, Part
from canaryd.backend.pool_backend import PoolBackend, device_errors
from canaryd.backend.results import Results
from canaryd.errors import BackendError
from canaryd.watch.burst import Burst, BurstResult

CONTENT_ITEMS = 1 << 18
"""Slots that one piece reads of a group."""
LISTED = 1 << 17
"""Length of each list of one piece, all groups together."""
_MIN_LISTED = 1024
_INTERPRETED = 512
_FOLDS = 1 << 21
"""Words of scratch for the folds of scheme sglang: one per region and slot."""


@dataclass(kw_only=True)
class _Running:
    """A burst in flight: its pieces, of which the first is on the device, and what was found so far."""

    burst: Burst
    pieces: Iterator[tuple[Part, ...]]
    results: Results
    piece: tuple[Part, ...] | None
    count: int = 0
    bytes_read: int = 0
    busy_seconds: float = 0.0


class GraphBackend(PoolBackend):
    """Compiles and captures on construction; `start` packs and replays."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        *,
        scheme: Scheme,
        key: int,
        chunk_items: int | None,
        finding_capacity: int,
    ) -> None:
        tables = [DigestTable(layout, scheme) for layout in layouts]
        super().__init__(layouts, scheme=scheme, key=key, finding_capacity=finding_capacity)
        limits = _limits(layouts, scheme, chunk_items)
        self._cutter = Cutter(layouts, limits=limits, scheme=scheme, key=key)
        self._launches: Counter[str] = Counter()
        self._running: _Running | None = None
        self._class = 0
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream: torch.cuda.Stream | None = None
        self._groups: list[GroupKernels] = []
        with device_errors(), self._on_device():
            capacities = [SIZES * len(layouts)] + segment_capacities(limits.listed) * len(layouts)
            self._worklist = WorkList(capacities, self.device)
            scratch = Scratch.allocate(limits.items, self.device)
            sizes = self._sizes = self._worklist.segment(0)
            self._found = torch.zeros_like(sizes, device="cpu", pin_memory=self.device.type == "cuda")
            found = self._found.numpy()
            self._groups += [
                GroupKernels(
                    layout=layout,
                    records=self._records[number],
                    table=tables[number],
                    worklist=self._worklist,
                    first_segment=1 + number * SEGMENTS,
                    sizes=sizes[number * SIZES : (number + 1) * SIZES],
                    found=found[number * SIZES : (number + 1) * SIZES],
                    scratch=scratch,
                    finding_capacity=finding_capacity,
                    scheme=scheme,
                    key=key,
                )
                for number, layout in enumerate(layouts)
            ]
            if self.device.type == "cuda":
                self._capture()

    def start(self, burst: Burst) -> None:
        """See `PoolBackend.start`."""
        self._check_open(None if self._running is None else self._running.burst.number)
        self._launches.clear()
        pieces = self._cutter.pieces(burst)
        running = _Running(
            burst=burst, pieces=pieces, results=Results(burst, self._finding_capacity), piece=next(pieces, None)
        )
        self._launch(running)
        self._running = running

    def poll(self) -> BurstResult | None:
        """See `PoolBackend.poll`; starts the next piece when one is done."""
        running = self._running
        if running is None:
            raise BackendError("no burst was started")
        if running.piece is not None:
            try:
                with device_errors():
                    if not self._done():
                        return None
                    self._collect(running, running.piece)
                    running.piece = next(running.pieces, None)
                self._launch(running)
            except BaseException:
                self._running = None  # it will never be done
                raise
            if running.piece is not None:
                return None
        self._running = None
        with device_errors():
            self._check_copies(running.burst, running.results)
        return BurstResult(
            number=running.burst.number,
            groups=running.results.groups(),
            bytes_read=running.bytes_read,
            busy_seconds=running.busy_seconds,
            launches=dict(self._launches),
            pieces=running.count,
        )

    # --- pieces -----------------------------------------------------------------------------------------------------

    def _launch(self, running: _Running) -> None:
        if running.piece is None:
            return
        with device_errors():
            running.bytes_read += self._pack(running.piece)
            running.count += 1
            self._replay(running.piece)

    def _pack(self, piece: tuple[Part, ...]) -> int:
        """Fills the work list; how many bytes of the pool the piece reads."""
        self._worklist.begin()
        sizes = self._worklist.room(0, SIZES * len(self._groups))
        sizes[:] = 0
        bytes_read = 0
        for part in sorted(piece, key=lambda part: part.group):
            kernels = self._groups[part.group]
            own = sizes[part.group * SIZES : (part.group + 1) * SIZES]
            bytes_read += kernels.pack(part, own) * self._layouts[part.group].slot_bytes
            for kernel in kernels.launches(part):
                self._launches[kernel] += 1
                record_launch(kernel)
        self._class = self._worklist.seal()
        return bytes_read

    def _enqueue(self, number: int, groups: Iterable[GroupKernels]) -> None:
        """The launches of one piece whose list is of this class, whatever else it holds of these groups."""
        self._worklist.enqueue(number)
        for kernels in groups:
            kernels.enqueue()
        enqueue_hand_back(self._sizes, self._found)

    def _collect(self, running: _Running, piece: tuple[Part, ...]) -> None:
        running.busy_seconds += self._busy()
        for part in piece:
            self._groups[part.group].collect(part, running.results)

    # --- the device -------------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """Compiles every kernel by an empty piece, then records the same launches as graphs, and replays each once: a
        graph's first replay uploads it to the device.

        Replays go to the default stream, which has the lowest priority and needs no switching.
        """
        self._stream = torch.cuda.default_stream(self.device)
        self._began, self._ended = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._pack(())
        self._enqueue(0, self._groups)
        self._stream.synchronize()
        for number in range(len(self._worklist.classes)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._enqueue(number, self._groups)
            graph.replay()
            self._graphs.append(graph)
        self._stream.synchronize()

    def _replay(self, piece: tuple[Part, ...]) -> None:
        if self._stream is None:
            began = time.perf_counter()
            self._enqueue(self._class, [self._groups[part.group] for part in piece])
            self._seconds = time.perf_counter() - began
            return
        self._began.record(self._stream)
        self._graphs[self._class].replay()
        self._ended.record(self._stream)

    def _done(self) -> bool:
        return self._stream is None or bool(self._ended.query())  # type: ignore[no-untyped-call]

    def _busy(self) -> float:
        return self._seconds if self._stream is None else self._began.elapsed_time(self._ended) / 1000

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _drop(self) -> None:
        self._running = None
        self._graphs.clear()
        self._groups.clear()
        del self._worklist, self._cutter


def _limits(layouts: Sequence[GroupLayout], scheme: Scheme, chunk_items: int | None) -> Limits:
    if chunk_items is not None:
        return Limits(items=chunk_items, listed=chunk_items)
    if layouts[0].device.type != "cuda":
        return Limits(items=_INTERPRETED, listed=_INTERPRETED)
    listed = max(_MIN_LISTED, LISTED // len(layouts))
    items = CONTENT_ITEMS
    if scheme == "sglang":
        items = max(_MIN_LISTED, min(items, _FOLDS // max(len(layout.regions) for layout in layouts)))
    return Limits(items=items, listed=listed)

"""What runs bursts on one attachment's pool, whatever the device.

Host pools run the torch references, CUDA pools the Triton kernels as one graph; everything above this interface is the
same code. Work larger than the scratch is cut into pieces, so that the memory in use does not depend on the burst.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from canary_kernels.launches import Backend, resolve_backend
from canary_kernels.layout import GroupLayout
from canary_kernels.locate import WordChange, locate_word_change
from canary_kernels.records import DIGEST, FLAGS, STAMPED, SUM, SlotRecord, allocate_records
from canary_kernels.scheme import Scheme

from canaryd.backend.results import Results
from canaryd.errors import BackendError
from canaryd.watch.burst import Burst, BurstResult, CopyMismatches, CopyWork

FINDING_CAPACITY = 4096
"""Mismatches listed per compare or links work; the rest is counted in `truncated`."""


def is_device_error(error: Exception) -> bool:
    """Whether torch or Triton raises this for a device that failed, or for a kernel that could not be built for it (no
    compiler, no room for its cache)."""
    kinds = (RuntimeError, MemoryError, OSError, subprocess.SubprocessError)
    return isinstance(error, kinds) or type(error).__module__.startswith("triton.")


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Turns what torch and Triton raise for a failed device into BackendError."""
    try:
        yield
    except Exception as error:
        if is_device_error(error):
            raise BackendError(f"{type(error).__name__}: {error}") from error
        raise


class PoolBackend(ABC):
    """Records and scratch of one attachment. One burst at a time; not thread-safe.

    Args:
        layouts: one per group, all on one device, in group order.
        scheme: fingerprint scheme.
        key: secret of the native chain, any 64-bit integer.
        finding_capacity: mismatches listed per compare or links work.

    Raises:
        BackendError: device state could not be allocated.
    """

    def __init__(self, layouts: Sequence[GroupLayout], *, scheme: Scheme, key: int, finding_capacity: int) -> None:
        self.device = layouts[0].device
        self._layouts = tuple(layouts)
        self._scheme: Scheme = scheme
        self._key = key
        self._finding_capacity = finding_capacity
        self._records: list[torch.Tensor] = []
        with device_errors():
            self._records += [allocate_records(layout.num_slots, self.device) for layout in layouts]

    def run(self, burst: Burst) -> BurstResult:
        """Runs a burst and waits for its result.

        Raises:
            BackendError: the device failed; nothing of the burst may be used.
        """
        self.start(burst)
        while (result := self.poll()) is None:
            time.sleep(0.0002)
        return result

    @abstractmethod
    def start(self, burst: Burst) -> None:
        """Queues a burst: per group its stamps, then links and compares.

        Raises:
            BackendError: the device failed, or the last burst's result was not fetched.
        """

    @abstractmethod
    def poll(self) -> BurstResult | None:
        """The result of the burst started last, or None while the device still works on it. Never blocks.

        Raises:
            BackendError: the device failed, or no burst was started.
        """

    def slot_record(self, group: int, slot: int) -> SlotRecord:
        """The record of one slot, for findings and debugging; on a GPU waits for the work in flight.

        Raises:
            BackendError: the device failed.
            IndexError: no such group or slot.
        """
        if not 0 <= slot < self._layouts[group].num_slots:
            raise IndexError(f"group {group} has no slot {slot}")
        with device_errors():
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
        with device_errors():
            return locate_word_change(self._layouts[group], slot, stored_digest=stored_digest, stored_sum=stored_sum)

    def stamped_with(self, group: int, digest: int, total: int) -> list[int]:
        """At most two slots whose stamp has this digest and sum; looks at all records of the group.

        Raises:
            BackendError: the device failed.
        """
        records = self._records[group]
        with device_errors():
            same = (records[:, DIGEST] == digest) & (records[:, SUM] == total) & ((records[:, FLAGS] & STAMPED) != 0)
            return [int(slot) for slot in same.nonzero()[:2, 0].tolist()]

    def _check_copies(self, burst: Burst, results: Results) -> None:
        """Compares the stamps of copies, after the burst's other work; by plain operations, since copies are few."""
        for number, work in enumerate(burst.works):
            if work.copies is not None:
                results.set_copies(number, self._copies(work.group, work.copies))

    def _copies(self, group: int, work: CopyWork) -> CopyMismatches:
        pairs = torch.from_numpy(np.stack([work.sources, work.destinations])).to(self.device)
        sources, destinations = self._records[group][:, DIGEST : SUM + 1][pairs].cpu().numpy()
        items = (sources != destinations).any(axis=1).nonzero()[0]
        return CopyMismatches(
            items=items,
            source_digests=sources[items, 0],
            digests=destinations[items, 0],
            source_sums=sources[items, 1],
            sums=destinations[items, 1],
        )

    def close(self) -> None:
        """Waits for work in flight and drops all device state; the pool's memory may be unmapped afterwards.

        Raises:
            BackendError: the device failed; the state is dropped all the same.
        """
        try:
            with device_errors():
                self._wait()
        finally:  # a failed device too: nothing may hold the pool's memory any longer
            self._drop()
            self._records.clear()
            self._layouts = ()

    def _check_open(self, running: int | None) -> None:
        """Refuses a burst on a closed backend, or while burst number `running` is in flight."""
        if not self._layouts:
            raise BackendError("the backend is closed")
        if running is not None:
            raise BackendError(f"burst {running} is still running")

    @abstractmethod
    def _wait(self) -> None:
        """Waits for work in flight."""

    @abstractmethod
    def _drop(self) -> None:
        """Drops all device state but the records."""


def make_backend(
    layouts: Sequence[GroupLayout],
    *,
    scheme: Scheme,
    key: int,
    backend: Backend | None = None,
    chunk_items: int | None = None,
    finding_capacity: int = FINDING_CAPACITY,
) -> PoolBackend:
    """The backend of one attachment. On a GPU it compiles its kernels here, and in no burst.

    Args:
        layouts: one per group, all on one device, in group order.
        scheme: fingerprint scheme.
        key: secret of the native chain, any 64-bit integer.
        backend: None picks by device; "triton" forces the kernels, "reference" torch.
        chunk_items, finding_capacity: sizes of scratch and result lists, for tests.

    Raises:
        BackendError: device state could not be allocated, or a kernel not compiled.
        KernelArgumentError: the scheme cannot read a layout.
        ValueError: no layout, or layouts on several devices.
    """
    if not layouts or any(layout.device != layouts[0].device for layout in layouts):
        raise ValueError("a backend needs at least one layout, all on one device")
    if resolve_backend("digest", backend, layouts[0].regions[0].memory) == "reference":
        from canaryd.backend.reference_backend import ReferenceBackend

        return ReferenceBackend(
            layouts, scheme=scheme, key=key, chunk_items=chunk_items, finding_capacity=finding_capacity
        )
    from canaryd.backend.graph_backend import GraphBackend

    return GraphBackend(layouts, scheme=scheme, key=key, chunk_items=chunk_items, finding_capacity=finding_capacity)

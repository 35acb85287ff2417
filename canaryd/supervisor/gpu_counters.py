"""The GPUs' own error counters, read beside the main loop: a sick GPU may keep the management library waiting."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from canaryd.findings.finding import Hardware
from canaryd.logs import event_logger

log = event_logger(__name__)

_EVENT_WAIT_MS = 500
_MAX_XIDS = 16
_POLL_SECONDS = 60.0
WINDOW_SECONDS = 600.0
"""An error that is older says nothing of a finding made now."""
_MAX_QUEUED = 256


class GpuCounters:
    """A thread that notes Xid errors from its start on, and reads ECC and row-remap counters when asked.

    Args:
        gpus: UUIDs.
        library: stands in for pynvml in tests.
    """

    def __init__(self, gpus: Sequence[str], library: Any = None) -> None:
        self._gpus = tuple(gpus)
        self._library = library
        self._wanted: queue.Queue[tuple[str, float]] = queue.Queue(_MAX_QUEUED)
        self._read: queue.Queue[tuple[str, float, Hardware]] = queue.Queue(_MAX_QUEUED)
        self._xids: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._uncorrected: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-counters", daemon=True)

    def start(self) -> None:
        """Begin, if there is a GPU to look at."""
        if self._gpus:
            self._thread.start()

    def ask(self, gpu_uuid: str, since: float) -> None:
        """Read the GPU's counters soon, for findings seen at or after `since` (Unix seconds)."""
        if gpu_uuid in self._gpus and not self._wanted.full():
            self._wanted.put_nowait((gpu_uuid, since))

    def answers(self) -> list[tuple[str, float, Hardware]]:
        """What was read since the last call, each with what it was asked for."""
        return [self._read.get_nowait() for _ in range(self._read.qsize())]

    def stop(self) -> None:
        """End soon; a thread that hangs in the driver ends with the process."""
        self._stopping.set()

    def _run(self) -> None:
        try:
            if self._library is None:
                import pynvml

                self._library = pynvml
            self._library.nvmlInit()
        except ImportError:
            log.info("nvidia-ml-py is not installed: findings carry no GPU counters")
            return
        except self._library.NVMLError as error:
            log.warning("the GPUs' error counters cannot be read", error=str(error))
            return
        try:
            self._watch()
        except self._library.NVMLError as error:
            log.warning("the GPUs' error counters are not read any more", error=str(error))
        finally:
            self._library.nvmlShutdown()

    def _watch(self) -> None:
        nvml = self._library
        devices = {uuid: _board(nvml, uuid) for uuid in self._gpus}
        events = None
        try:
            events = nvml.nvmlEventSetCreate()
            for device in devices.values():
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            log.info("Xid errors are not announced here", error=str(error))
            events = None
        poll_at = 0.0
        while not self._stopping.is_set():
            if time.monotonic() >= poll_at:
                poll_at = time.monotonic() + _POLL_SECONDS
                for uuid, device in devices.items():
                    self._snapshot(uuid, device)
            if events is not None:
                self._wait_for_xid(events, devices)
            try:
                uuid, since = self._wanted.get(timeout=0 if events else _EVENT_WAIT_MS / 1000)
            except queue.Empty:
                continue
            hardware = self._snapshot(uuid, devices[uuid])
            if not self._read.full():
                self._read.put_nowait((uuid, since, hardware))

    def _wait_for_xid(self, events: Any, devices: dict[str, Any]) -> None:
        nvml = self._library
        try:
            event = nvml.nvmlEventSetWait_v2(events, _EVENT_WAIT_MS if self._wanted.empty() else 0)
        except nvml.NVMLError:
            return  # nothing happened meanwhile
        xid, board = int(event.eventData), nvml.nvmlDeviceGetUUID(event.device)
        for uuid, device in devices.items():
            if nvml.nvmlDeviceGetUUID(device) == board:
                self._xids[uuid] = [*self._xids[uuid], (time.time(), xid)][-_MAX_XIDS:]
                log.error("the GPU reported an Xid error", device=uuid, xid=xid)

    def _snapshot(self, uuid: str, device: Any) -> Hardware:
        nvml = self._library

        def ask(name: str, *arguments: Any) -> Any:
            try:
                return getattr(nvml, name)(device, *arguments)
            except nvml.NVMLError:
                return None  # this GPU does not say

        ecc = ask("nvmlDeviceGetEccMode")
        volatile = nvml.NVML_VOLATILE_ECC
        uncorrected = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile)
        remapped = ask("nvmlDeviceGetRemappedRows")
        now = time.time()
        return Hardware(
            time=now,
            ecc=None if ecc is None else bool(ecc[0]),
            corrected=ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
            uncorrected=uncorrected,
            new_uncorrected=None if uncorrected is None else self._new(uuid, now, uncorrected),
            remapped_rows=None if remapped is None else int(remapped[0] + remapped[1]),
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            xids=tuple(xid for moment, xid in self._xids[uuid] if now - moment <= WINDOW_SECONDS),
        )

    def _new(self, uuid: str, now: float, uncorrected: int) -> int:
        """How many of the errors came within the window, or since the first look."""
        history = self._uncorrected[uuid]
        history.append((now, uncorrected))
        while len(history) > 1 and now - history[1][0] > WINDOW_SECONDS:
            del history[0]  # the last look before the window stays: it is what to compare with
        return uncorrected - history[0][1]


def _board(nvml: Any, uuid: str) -> Any:
    """The GPU, also for a part of it: counters belong to the board."""
    device = nvml.nvmlDeviceGetHandleByUUID(uuid)
    if uuid.startswith("MIG-"):
        return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
    return device

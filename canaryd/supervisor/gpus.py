"""Which GPUs there are, by UUID. Asks the driver's management library; never touches CUDA."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from canaryd.logs import event_logger

log = event_logger(__name__)


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs (or of the MIG devices of a partitioned GPU) that the driver shows; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        found = gpus_of_proc(Path("/proc/driver/nvidia/gpus"))
        log.info("nvidia-ml-py is not installed: GPUs as the kernel driver lists them", gpus=len(found))
        return found
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.info("no NVIDIA driver answers: no GPU workers", error=str(error))
        return []
    try:
        uuids: list[str] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuids += _mig_uuids(pynvml, device) or [_text(pynvml.nvmlDeviceGetUUID(device))]
        return uuids
    finally:
        pynvml.nvmlShutdown()


def gpus_of_proc(folder: Path) -> list[str]:
    """UUIDs in the files `*/information` that the kernel driver shows; MIG devices are not among them."""
    found = []
    for file in sorted(folder.glob("*/information")):
        try:
            match = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", file.read_text(), re.MULTILINE)
        except OSError as error:
            log.warning("a GPU cannot be identified", file=file, error=error.strerror)
            continue
        if match:
            found.append(match[1])
    return found


def _mig_uuids(pynvml: Any, device: Any) -> list[str]:
    found: list[str] = []
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(device)
        if not current:
            return []
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
            try:
                part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
            except pynvml.NVMLError:
                continue  # this index holds no device
            found.append(_text(pynvml.nvmlDeviceGetUUID(part)))
    except pynvml.NVMLError:
        return []  # not a GPU that can be partitioned
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

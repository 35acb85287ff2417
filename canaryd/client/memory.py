"""Exporting the engine's pool: host tensors through shared memory, GPU tensors through raw CUDA IPC handles."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from canaryd.errors import AttachRefused, RefusalReason
from canaryd.pool.cuda_driver import CudaCallFailed, CudaDriver, cuda_driver
from canaryd.wire.messages import CudaIpcMemory, HostShmMemory, Memory

if TYPE_CHECKING:
    import torch

_UNNUMBERED = 1
"""`fd_index` until the client numbers the descriptors of one hello."""

_generations = itertools.count(1)

_NO_HANDLE_CAUSE = (
    "The pool's GPU memory has no CUDA IPC handle: it was not allocated by cudaMalloc, as happens with "
    "expandable segments, sleep mode, a memory saver or the cudaMallocAsync backend."
)
_NO_HANDLE_REMEDY = (
    "Start the engine without `expandable_segments:True` and `backend:cudaMallocAsync` in PYTORCH_CUDA_ALLOC_CONF (or "
    "PYTORCH_ALLOC_CONF), and without sleep mode (vLLM: --enable-sleep-mode) or memory saver (SGLang: "
    "--enable-memory-saver)."
)


@dataclass(kw_only=True, eq=False)
class ExportedMemory:
    """One piece of exported memory: how it is described on the wire, and its descriptor if it is host memory.

    `handle` inside `memory` is a right to read and write the pool; the representation does not show it.
    """

    memory: Memory
    fd: int | None = None

    def __repr__(self) -> str:
        return f"ExportedMemory({type(self.memory).__name__}, offset={self.memory.offset}, size={self.memory.size})"

    def close(self) -> None:
        """Close the descriptor. The tensor is not touched."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def export_host_tensor(tensor: torch.Tensor) -> ExportedMemory:
    """Share a contiguous CPU tensor in place and describe it; existing views follow the storage.

    Raises AttachRefused if the tensor is not contiguous CPU memory or cannot be moved to shared memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        raise AttachRefused(
            RefusalReason.MEMORY_KIND,
            "Host memory is exported from a non-empty contiguous CPU tensor, and this tensor is none.",
            "Export the flat tensor that backs the pool.",
        )
    # moves the storage to shared memory if it is not there; the descriptor stays torch's own, hence the dup
    fd, size = tensor.untyped_storage()._share_fd_cpu_()
    offset = int(tensor.storage_offset()) * tensor.element_size()
    length = tensor.numel() * tensor.element_size()
    if offset + length > size:
        raise AttachRefused(
            RefusalReason.MEMORY_SIZE,
            f"The tensor ends at byte {offset + length} of a shared file of {size} bytes.",
            "Export the flat tensor that backs the pool.",
        )
    return ExportedMemory(memory=HostShmMemory(fd_index=_UNNUMBERED, offset=offset, size=length), fd=os.dup(fd))


def export_cuda_tensor(tensor: torch.Tensor, driver: CudaDriver | None = None) -> ExportedMemory:
    """Describe a contiguous CUDA tensor by the raw IPC handle of its allocation. The tensor is not touched.

    Args:
        tensor: the flat tensor that backs the pool; it must outlive the attachment.
        driver: the driver to call; None: cuda-bindings.

    Raises AttachRefused if the memory cannot be shared by handle; the remedy names the setting to change.
    """
    if tensor.device.type != "cuda" or not tensor.is_contiguous() or tensor.numel() == 0:
        raise AttachRefused(
            RefusalReason.MEMORY_KIND,
            "GPU memory is exported from a non-empty contiguous CUDA tensor, and this tensor is none.",
            "Export the flat tensor that backs the pool.",
        )
    return export_cuda_memory(
        tensor.device.index, tensor.data_ptr(), tensor.numel() * tensor.element_size(), driver=driver
    )


def export_cuda_memory(device: int, pointer: int, size: int, driver: CudaDriver | None = None) -> ExportedMemory:
    """Describe `size` bytes at `pointer` on GPU `device` (torch's ordinal). Raises as `export_cuda_tensor`."""
    if driver is None:
        driver = cuda_driver()
    try:
        uuid = driver.uuids()[device]
        if not driver.can_export(device, pointer):
            raise AttachRefused(RefusalReason.MEMORY_KIND, _NO_HANDLE_CAUSE, _NO_HANDLE_REMEDY)
        base, allocated = driver.address_range(device, pointer)
        if not base <= pointer <= pointer + size <= base + allocated:
            raise AttachRefused(
                RefusalReason.MEMORY_SIZE,
                f"The memory has {size} bytes and leaves its allocation of {allocated} bytes.",
                "Export each allocation of the pool as a memory of its own.",
            )
        handle = driver.export_handle(device, pointer)
    except CudaCallFailed as error:
        raise AttachRefused(RefusalReason.MEMORY_KIND, f"{_NO_HANDLE_CAUSE} ({error}.)", _NO_HANDLE_REMEDY) from error
    return ExportedMemory(
        memory=CudaIpcMemory(
            handle=handle, offset=pointer - base, size=size, gpu_uuid=uuid, generation=next(_generations)
        )
    )

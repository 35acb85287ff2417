"""Exporting the engine's pool: host tensors through shared memory, GPU tensors through raw CUDA IPC handles."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from canaryd.errors import AttachRefused, RefusalReason
from canaryd.wire.messages import HostShmMemory, Memory

if TYPE_CHECKING:
    import torch

    from canaryd.pool.cuda_driver import CudaDriver

_UNNUMBERED = 1
"""`fd_index` until the client numbers the descriptors of one hello."""


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
    """Describe a contiguous CUDA tensor by the raw IPC handle of its allocation.

    Raises AttachRefused if the memory cannot be shared by handle; the remedy names the setting to change.
    """
    raise NotImplementedError

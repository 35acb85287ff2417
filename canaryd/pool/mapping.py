"""Mapping an engine's memory into the worker: host memory by descriptor, GPU memory by CUDA IPC handle."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Sequence

import torch

from canaryd.errors import AttachRefused, BackendError, RefusalReason
from canaryd.pool.cuda_driver import CudaCallFailed, uuid_digits
from canaryd.pool.handles import OpenHandles, open_handles
from canaryd.wire.messages import CudaIpcMemory, HostShmMemory, Memory

_Files = dict[tuple[int, int], torch.Tensor]
"""Whole files by device and inode."""


class MappedPool:
    """Mapped memories of one attachment.

    `tensors` are 1-D uint8, one per memory of the attachment, on the memory's device. Read-only use. Drop every
    tensor and view made from them *before* `close`: what points into a closed mapping crashes the process.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._unmap: list[Callable[[], None]] = []

    def add(self, tensor: torch.Tensor, unmap: Callable[[], None]) -> None:
        """One more memory and what unmaps it."""
        self.tensors.append(tensor)
        self._unmap.append(unmap)

    def close(self) -> None:
        """Unmap everything. May be called twice.

        Raises BackendError if an unmapping failed; the others were tried all the same. Memory then stays pinned until
        this process ends.
        """
        self.tensors.clear()
        failed: list[CudaCallFailed] = []
        while self._unmap:
            try:
                self._unmap.pop()()
            except CudaCallFailed as error:
                failed.append(error)
        if failed:
            raise BackendError(f"{len(failed)} memories could not be unmapped: {failed[0]}") from failed[0]


def map_memories(
    memories: Sequence[Memory], fds: Sequence[int], *, device_uuid: str | None, handles: OpenHandles | None = None
) -> MappedPool:
    """Map every memory of an attachment.

    Args:
        memories: as described in the attach message.
        fds: descriptors of the hello, number 0 the announce page; they stay the caller's.
        device_uuid: UUID of the worker's GPU; None for the worker of host pools.
        handles: this process's opened CUDA handles; None: those of the real driver.

    Raises AttachRefused; nothing stays mapped then.
    """
    pool = MappedPool()
    files: _Files = {}
    try:
        for memory in memories:
            if isinstance(memory, HostShmMemory):
                _map_host(pool, memory, fds, device_uuid, files)
            else:
                _map_cuda(pool, memory, device_uuid, handles)
    except BaseException:
        pool.close()
        raise
    return pool


def _map_host(
    pool: MappedPool, memory: HostShmMemory, fds: Sequence[int], device_uuid: str | None, files: _Files
) -> None:
    if device_uuid is not None:
        raise AttachRefused(
            RefusalReason.MEMORY_KIND,
            "The attachment mixes host memory with GPU memory.",
            "Attach host pools and GPU pools as separate engines.",
        )
    if not 1 <= memory.fd_index < len(fds):
        raise AttachRefused(
            RefusalReason.HANDLE_INVALID,
            f"Host memory names descriptor {memory.fd_index}, and the side connection carried {len(fds)}.",
            "Send one descriptor for each host memory behind the announce page.",
        )
    fd = fds[memory.fd_index]
    end = memory.offset + memory.size
    try:
        status = os.fstat(fd)
        if end > status.st_size:
            raise AttachRefused(
                RefusalReason.MEMORY_SIZE,
                f"Host memory ends at byte {end} of a file of {status.st_size} bytes.",
                "Describe memory that the shared file holds.",
            )
        # each file is mapped once, so that equal bytes have equal addresses and overlaps show
        file = files.get((status.st_dev, status.st_ino))
        if file is None:
            file = _map_file(fd, status.st_size)
            files[status.st_dev, status.st_ino] = file
    except (OSError, ValueError) as error:
        raise AttachRefused(
            RefusalReason.HANDLE_INVALID,
            f"Host memory cannot be mapped: {error}.",
            "Export the pool as a shared memory file that is open for reading.",
        ) from error
    # no explicit unmapping: the mapping ends with the last tensor that looks into it
    pool.add(file[memory.offset : end], lambda: None)


def _map_file(fd: int, size: int) -> torch.Tensor:
    # PROT_READ: a write of ours would be a crash, not damage to the engine
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapping, dtype=torch.uint8)


def _map_cuda(pool: MappedPool, memory: CudaIpcMemory, device_uuid: str | None, handles: OpenHandles | None) -> None:
    if device_uuid is None:
        raise AttachRefused(
            RefusalReason.MEMORY_KIND,
            "The attachment mixes GPU memory with host memory.",
            "Attach host pools and GPU pools as separate engines.",
        )
    if uuid_digits(memory.gpu_uuid) != uuid_digits(device_uuid):
        raise AttachRefused(
            RefusalReason.GPU_NOT_VISIBLE,
            f"The memory is on {memory.gpu_uuid}, and this worker has {device_uuid}.",
            "Attach each rank with the memory of one GPU.",
        )
    if handles is None:
        handles = open_handles()
    device = handles.device(device_uuid)
    address, size = handles.open(device, memory.handle)

    def unmap() -> None:
        handles.close(device, memory.handle)

    end = memory.offset + memory.size
    if end > size:
        unmap()
        raise AttachRefused(
            RefusalReason.MEMORY_SIZE,
            f"GPU memory ends at byte {end} of an allocation of {size} bytes.",
            "Describe memory that the allocation holds.",
        )
    try:
        tensor = handles.driver.view(device, address + memory.offset, memory.size)
    except BaseException:
        unmap()
        raise
    pool.add(tensor, unmap)

"""CUDA IPC handles that this process has open: each is opened once, however many memories name it."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

from canaryd.errors import AttachRefused, RefusalReason
from canaryd.pool.cuda_driver import CudaCallFailed, CudaDriver, cuda_driver, uuid_digits


@dataclass(eq=False)
class _Opened:
    address: int
    size: int
    users: int


class OpenHandles:
    """Reference-counted handles of one process.

    Args:
        driver: the driver to call.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._opened: dict[tuple[int, bytes], _Opened] = {}
        self._lock = threading.Lock()

    def device(self, uuid: str) -> int:
        """Ordinal of the GPU. Raises AttachRefused if this process does not see it."""
        try:
            visible = [uuid_digits(each) for each in self.driver.uuids()]
        except CudaCallFailed as error:
            raise AttachRefused(
                RefusalReason.GPU_NOT_VISIBLE, f"The visible GPUs cannot be listed: {error}.", _VISIBLE_REMEDY
            ) from error
        if uuid_digits(uuid) not in visible:
            raise AttachRefused(
                RefusalReason.GPU_NOT_VISIBLE,
                f"The memory is on {uuid}, which the daemon does not see.",
                _VISIBLE_REMEDY,
            )
        return visible.index(uuid_digits(uuid))

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        """Base address and true size in bytes of the allocation; one more user of it.

        Raises AttachRefused if the handle cannot be opened.
        """
        with self._lock:
            opened = self._opened.get((device, handle))
            if opened is None:
                opened = self._open(device, handle)
                self._opened[device, handle] = opened
            opened.users += 1
            return opened.address, opened.size

    def _open(self, device: int, handle: bytes) -> _Opened:
        try:
            address = self.driver.open_handle(device, handle)
        except CudaCallFailed as error:
            raise AttachRefused(
                RefusalReason.HANDLE_INVALID,
                f"The CUDA IPC handle cannot be opened: {error}.",
                "Run the daemon on the engine's host, with the same GPU and driver, while the engine lives; if both "
                "run in PID namespaces of their own, share one, since equal process ids cannot share memory.",
            ) from error
        try:
            base, size = self.driver.address_range(device, address)
        except CudaCallFailed as error:
            self.driver.close_handle(device, address)
            raise AttachRefused(
                RefusalReason.HANDLE_INVALID,
                f"The size of the opened memory cannot be read: {error}.",
                "Update the NVIDIA driver.",
            ) from error
        # the handle is that of the allocation's base, so offsets count from the address that opening gave
        return _Opened(address=address, size=base + size - address, users=0)

    def close(self, device: int, handle: bytes) -> None:
        """One user fewer; the last one unmaps. Raises CudaCallFailed if that fails, KeyError for one never opened."""
        with self._lock:
            opened = self._opened[device, handle]
            opened.users -= 1
            if opened.users == 0:
                del self._opened[device, handle]
                self.driver.close_handle(device, opened.address)

    def __len__(self) -> int:
        return len(self._opened)


_VISIBLE_REMEDY = "Give the daemon the engine's GPU (NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)."


@functools.cache
def open_handles() -> OpenHandles:
    """This process's handles, through the real driver. Raises AttachRefused without one."""
    return OpenHandles(cuda_driver())

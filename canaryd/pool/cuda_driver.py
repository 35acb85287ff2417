"""The few driver calls that sharing GPU memory needs, through cuda-bindings (12.6 to 13.x), behind a typed surface.

Every call binds the device's primary context (the one that torch uses) for its own duration and puts back what was
current before: the runtime's current device of an engine's thread must not change under the engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from canaryd.errors import AttachRefused, RefusalReason

if TYPE_CHECKING:
    import torch

_HANDLE_BYTES = 64
_UUID_BYTES = 16


class CudaCallFailed(Exception):
    """A driver call failed; `name` is the driver's name of the error, such as `CUDA_ERROR_INVALID_VALUE`."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed with {name}")
        self.call = call
        self.name = name


class CudaDriver(Protocol):
    """What export and import need. Devices are ordinals as torch counts them; every method raises CudaCallFailed."""

    def uuids(self) -> list[str]:
        """UUIDs of the visible devices by ordinal, as NVML prints them."""
        ...

    def address_range(self, device: int, pointer: int) -> tuple[int, int]:
        """Base address and true size in bytes of the allocation that holds `pointer`."""
        ...

    def can_export(self, device: int, pointer: int) -> bool:
        """Whether the allocation can be shared by a legacy IPC handle."""
        ...

    def export_handle(self, device: int, pointer: int) -> bytes:
        """The 64-byte handle of the allocation that holds `pointer`."""
        ...

    def open_handle(self, device: int, handle: bytes) -> int:
        """Map an allocation of another process; the address of its base."""
        ...

    def close_handle(self, device: int, pointer: int) -> None:
        """Wait for this process's own work on the device, then unmap."""
        ...

    def view(self, device: int, address: int, size: int) -> torch.Tensor:
        """A 1-D uint8 tensor over `size` bytes at `address`, which must be proven to be mapped."""
        ...


class _DeviceBytes:
    """`size` bytes of GPU memory at `address`, for torch to wrap without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class BindingsDriver:
    """`CudaDriver` on cuda-bindings. Raises ImportError without them, CudaCallFailed without a driver."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:
            # cuda-bindings raises one of its own kind when there is no libcuda.so.1
            raise CudaCallFailed("cuInit", "no CUDA driver was found") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call, check the status, and give what is left of the result: nothing, one value or a tuple."""
        status, *rest = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaCallFailed(name, getattr(status, "name", str(status)))
        return rest[0] if len(rest) == 1 else tuple(rest)

    @contextlib.contextmanager
    def _bound(self, device: int) -> Iterator[None]:
        with self._lock:
            context = self._contexts.get(device)
            if context is None:
                context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
                self._contexts[device] = context
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def uuids(self) -> list[str]:
        """UUIDs of the visible devices by ordinal, as NVML prints them."""
        # version 2 of the call knows MIG devices; the bindings of CUDA 13 dropped the suffix with version 1
        name = "cuDeviceGetUuid_v2" if hasattr(self._driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        found: list[str] = []
        for ordinal in range(self._call("cuDeviceGetCount")):
            uuid = self._call(name, self._call("cuDeviceGet", ordinal))
            digits = ctypes.string_at(uuid.getPtr(), _UUID_BYTES).hex()
            text = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
            found.append(_uuid_prefix(text) + text)
        return found

    def address_range(self, device: int, pointer: int) -> tuple[int, int]:
        """Base address and true size in bytes of the allocation that holds `pointer`."""
        with self._bound(device):
            base, size = self._call("cuMemGetAddressRange", pointer)
        return int(base), int(size)

    def can_export(self, device: int, pointer: int) -> bool:
        """Whether the allocation can be shared by a legacy IPC handle."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        with self._bound(device):
            return bool(self._call("cuPointerGetAttribute", attribute, pointer))

    def export_handle(self, device: int, pointer: int) -> bytes:
        """The 64-byte handle of the allocation that holds `pointer`."""
        with self._bound(device):
            handle = self._call("cuIpcGetMemHandle", pointer)
        # newer bindings show nothing but the address of the struct
        return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def open_handle(self, device: int, handle: bytes) -> int:
        """Map an allocation of another process; the address of its base."""
        if len(handle) != _HANDLE_BYTES:
            raise ValueError(f"a handle has {_HANDLE_BYTES} bytes, got {len(handle)}")
        struct = self._driver.CUipcMemHandle()
        ctypes.memmove(struct.getPtr(), handle, _HANDLE_BYTES)
        lazy_peer_access = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        with self._bound(device):
            return int(self._call("cuIpcOpenMemHandle", struct, lazy_peer_access))

    def close_handle(self, device: int, pointer: int) -> None:
        """Wait for this process's own work on the device, then unmap."""
        with self._bound(device):
            # a kernel that still reads the mapping would fault, and the fault would end this process's context
            self._call("cuCtxSynchronize")
            self._call("cuIpcCloseMemHandle", pointer)

    def view(self, device: int, address: int, size: int) -> torch.Tensor:
        """A 1-D uint8 tensor over `size` bytes at `address`, which must be proven to be mapped."""
        import torch

        return torch.as_tensor(_DeviceBytes(address, size), device=f"cuda:{device}")


def _uuid_prefix(text: str) -> str:
    """`MIG-` if NVML knows a MIG device of this UUID, else `GPU-`: the driver gives the digits alone."""
    try:
        import pynvml
    except ImportError:
        return "GPU-"
    try:
        pynvml.nvmlInit()
        try:
            pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{text}")
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return "GPU-"
    return "MIG-"


def uuid_digits(uuid: str) -> str:
    """The UUID without its `GPU-` or `MIG-`, in lower case: what identifies a device."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


@functools.cache
def cuda_driver() -> CudaDriver:
    """This process's driver. Raises AttachRefused if CUDA or its bindings are missing."""
    try:
        return BindingsDriver()
    except ImportError as error:
        raise AttachRefused(
            RefusalReason.MEMORY_KIND,
            "GPU memory is shared through cuda-bindings, and that package cannot be imported.",
            "Install canaryd with the `cuda` extra.",
        ) from error
    except CudaCallFailed as error:
        raise AttachRefused(
            RefusalReason.GPU_NOT_VISIBLE,
            f"The CUDA driver cannot be used here: {error}.",
            "Give the process the GPU's devices and driver (NVIDIA container runtime, NVIDIA_VISIBLE_DEVICES).",
        ) from error

"""`BindingsDriver` over a stand-in for cuda-bindings, in the shapes of CUDA 12 and 13: contexts, handles, UUIDs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from canaryd.pool.cuda_driver import BindingsDriver, CudaCallFailed, uuid_digits

BASE, SIZE = 0x7000_0000_0000, 4096
HANDLE = bytes(range(64))


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201


class Struct:
    """A struct of new bindings: nothing but an address."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(size)

    def getPtr(self) -> int:  # noqa: N802 - the name of the bindings
        return ctypes.addressof(self.buffer)


class Bindings:
    """Calls fail as the real ones do when no context is current; `current` is the calling thread's stack."""

    def __init__(self, uuid_call: str) -> None:
        self.current: list[str] = ["the engine's own"]
        self.retained: list[int] = []
        self.closed: list[int] = []
        self.module = ModuleType("driver")
        functions: dict[str, Callable[..., Any]] = {
            "cuInit": lambda flags: (Result.CUDA_SUCCESS,),
            "cuDeviceGetCount": lambda: (Result.CUDA_SUCCESS, 2),
            "cuDeviceGet": lambda ordinal: (Result.CUDA_SUCCESS, f"device {ordinal}"),
            "cuDevicePrimaryCtxRetain": self.retain,
            "cuCtxPushCurrent": self.push,
            "cuCtxPopCurrent": self.pop,
            "cuCtxSynchronize": self.bound(lambda: ()),
            "cuMemGetAddressRange": self.bound(lambda pointer: (BASE, SIZE)),
            "cuPointerGetAttribute": self.bound(lambda kind, pointer: (kind == "legacy" and pointer == BASE,)),
            "cuIpcGetMemHandle": self.bound(lambda pointer: (self.struct(HANDLE),)),
            "cuIpcOpenMemHandle": self.bound(self.open),
            "cuIpcCloseMemHandle": self.bound(lambda pointer: self.closed.append(pointer) or ()),
            uuid_call: lambda device: (Result.CUDA_SUCCESS, self.struct(bytes([int(device[-1])] * 16))),
        }
        for name, function in functions.items():
            setattr(self.module, name, function)
        self.module.CUresult = Result  # type: ignore[attr-defined]
        self.module.CUipcMemHandle = lambda: Struct(64)  # type: ignore[attr-defined]
        self.module.CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)  # type: ignore[attr-defined]
        self.module.CUpointer_attribute = SimpleNamespace(  # type: ignore[attr-defined]
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE="legacy"
        )

    def retain(self, device: str) -> tuple[Result, str]:
        self.retained.append(int(device[-1]))
        return Result.CUDA_SUCCESS, f"context of {device}"

    def push(self, context: str) -> tuple[Result]:
        self.current.append(context)
        return (Result.CUDA_SUCCESS,)

    def pop(self) -> tuple[Result, str]:
        return Result.CUDA_SUCCESS, self.current.pop()

    def bound(self, function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            if self.current[-1] != "context of device 1":
                return (Result.CUDA_ERROR_INVALID_CONTEXT,)
            try:
                return (Result.CUDA_SUCCESS, *function(*arguments))
            except ValueError:
                return (Result.CUDA_ERROR_INVALID_VALUE, None)

        return call

    def struct(self, data: bytes) -> Struct:
        struct = Struct(len(data))
        ctypes.memmove(struct.getPtr(), data, len(data))
        return struct

    def open(self, handle: Struct, flags: int) -> tuple[int]:
        if ctypes.string_at(handle.getPtr(), 64) != HANDLE or flags != 1:
            raise ValueError
        return (BASE,)


@pytest.fixture(params=["cuDeviceGetUuid_v2", "cuDeviceGetUuid"])
def bindings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bindings:
    bindings = Bindings(request.param)
    package = ModuleType("cuda.bindings")
    package.driver = bindings.module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings.module)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return bindings


def test_each_call_binds_the_primary_context_and_puts_back_the_engines(bindings: Bindings) -> None:
    driver = BindingsDriver()
    assert driver.address_range(1, BASE + 5) == (BASE, SIZE)
    assert driver.can_export(1, BASE)
    assert not driver.can_export(1, BASE + 1)
    handle = driver.export_handle(1, BASE)
    assert handle == HANDLE
    assert driver.open_handle(1, handle) == BASE
    driver.close_handle(1, BASE)
    assert bindings.closed == [BASE]
    assert bindings.current == ["the engine's own"]
    assert bindings.retained == [1], "the primary context is retained once"


def test_failures_carry_the_drivers_name_and_leave_the_context_alone(bindings: Bindings) -> None:
    driver = BindingsDriver()
    with pytest.raises(CudaCallFailed, match="cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_VALUE") as failed:
        driver.open_handle(1, bytes(64))
    assert failed.value.name == "CUDA_ERROR_INVALID_VALUE"
    assert bindings.current == ["the engine's own"]
    with pytest.raises(CudaCallFailed, match="INVALID_CONTEXT"):
        driver.address_range(0, BASE)
    assert bindings.current == ["the engine's own"]
    with pytest.raises(ValueError, match="64 bytes"):
        driver.open_handle(1, b"short")


@pytest.mark.usefixtures("bindings")
def test_uuids_are_written_as_nvml_prints_them() -> None:
    uuids = BindingsDriver().uuids()
    assert uuids == [
        "GPU-00000000-0000-0000-0000-000000000000",
        "GPU-01010101-0101-0101-0101-010101010101",
    ]


@pytest.mark.usefixtures("bindings")
def test_mig_devices_are_told_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None  # type: ignore[attr-defined]

    def by_uuid(uuid: str) -> None:
        if not uuid.startswith("MIG-01"):
            raise nvml.NVMLError

    nvml.nvmlDeviceGetHandleByUUID = by_uuid  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [uuid[:4] for uuid in BindingsDriver().uuids()] == ["GPU-", "MIG-"]


def test_uuid_digits() -> None:
    assert uuid_digits("GPU-AB-1") == uuid_digits("MIG-ab-1") == uuid_digits("ab-1") == "ab-1"

"""A CUDA driver made of host memory: allocations, handles, processes; no GPU."""

from __future__ import annotations

import itertools

import torch

from canaryd.pool.cuda_driver import CudaCallFailed

UUIDS = ("GPU-00000000-1111-2222-3333-444444444444", "MIG-AAAAAAAA-bbbb-cccc-dddd-eeeeeeeeeeee")


class Machine:
    """What the processes of one host share: allocations by handle."""

    def __init__(self) -> None:
        self.allocations: dict[bytes, torch.Tensor] = {}
        self._numbers = itertools.count(1)

    def allocate(self, size: int) -> tuple[bytes, torch.Tensor]:
        handle = next(self._numbers).to_bytes(64, "little")
        self.allocations[handle] = torch.arange(size, dtype=torch.int64).to(torch.uint8)
        return handle, self.allocations[handle]


class FakeDriver:
    """One process's driver. `fail` names calls that fail with the given error."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.fail: dict[str, str] = {}
        self.exportable = True
        self.opened: list[bytes] = []
        self.closed: list[int] = []

    def _may_fail(self, call: str) -> None:
        if call in self.fail:
            raise CudaCallFailed(call, self.fail[call])

    def uuids(self) -> list[str]:
        self._may_fail("uuids")
        return list(UUIDS)

    def address_range(self, device: int, pointer: int) -> tuple[int, int]:
        self._may_fail("address_range")
        for tensor in self.machine.allocations.values():
            if tensor.data_ptr() <= pointer < tensor.data_ptr() + tensor.numel():
                return tensor.data_ptr(), tensor.numel()
        raise CudaCallFailed("cuMemGetAddressRange", "CUDA_ERROR_INVALID_VALUE")

    def can_export(self, device: int, pointer: int) -> bool:
        return self.exportable

    def export_handle(self, device: int, pointer: int) -> bytes:
        self._may_fail("export_handle")
        base, _ = self.address_range(device, pointer)
        return next(handle for handle, tensor in self.machine.allocations.items() if tensor.data_ptr() == base)

    def open_handle(self, device: int, handle: bytes) -> int:
        self._may_fail("open_handle")
        if handle not in self.machine.allocations:
            raise CudaCallFailed("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE")
        self.opened.append(handle)
        return self.machine.allocations[handle].data_ptr()

    def close_handle(self, device: int, pointer: int) -> None:
        self.closed.append(pointer)
        self._may_fail("close_handle")

    def view(self, device: int, address: int, size: int) -> torch.Tensor:
        for tensor in self.machine.allocations.values():
            offset = address - tensor.data_ptr()
            if 0 <= offset < tensor.numel():
                assert offset + size <= tensor.numel(), "a tensor was made beyond the allocation"
                return tensor[offset : offset + size]
        raise AssertionError("a tensor was made over memory that is not mapped")

"""Export and import of GPU memory over a fake driver: bounds, counted handles, refusals with their remedies."""

from __future__ import annotations

import pytest
import torch
from fake_driver import UUIDS, FakeDriver, Machine

from canaryd.client.memory import export_cuda_memory, export_cuda_tensor
from canaryd.errors import AttachRefused, BackendError, RefusalReason
from canaryd.pool.handles import OpenHandles
from canaryd.pool.mapping import map_memories
from canaryd.wire.messages import CudaIpcMemory, HostShmMemory


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def driver(machine: Machine) -> FakeDriver:
    return FakeDriver(machine)


@pytest.fixture
def handles(driver: FakeDriver) -> OpenHandles:
    return OpenHandles(driver)


def described(handle: bytes, offset: int, size: int, uuid: str = UUIDS[0]) -> CudaIpcMemory:
    return CudaIpcMemory(handle=handle, offset=offset, size=size, gpu_uuid=uuid)


def test_export_describes_memory_inside_its_allocation(machine: Machine, driver: FakeDriver) -> None:
    machine.allocate(100)
    handle, allocation = machine.allocate(1000)
    exported = export_cuda_memory(0, allocation.data_ptr() + 12, 500, driver=driver)
    memory = exported.memory
    assert isinstance(memory, CudaIpcMemory)
    assert (memory.handle, memory.offset, memory.size, memory.gpu_uuid) == (handle, 12, 500, UUIDS[0])
    assert exported.fd is None
    assert handle.hex()[:16] not in repr(exported)
    assert "\\x" not in repr(exported)
    again = export_cuda_memory(1, allocation.data_ptr(), 1000, driver=driver).memory
    assert isinstance(again, CudaIpcMemory)
    assert again.gpu_uuid == UUIDS[1]
    assert again.generation > memory.generation


def test_export_refuses_what_has_no_handle(machine: Machine, driver: FakeDriver) -> None:
    _, allocation = machine.allocate(1000)
    driver.exportable = False
    with pytest.raises(AttachRefused) as refused:
        export_cuda_memory(0, allocation.data_ptr(), 8, driver=driver)
    assert refused.value.refusal is RefusalReason.MEMORY_KIND
    assert "expandable segments" in refused.value.cause
    assert "sleep mode" in refused.value.cause
    assert "PYTORCH_CUDA_ALLOC_CONF" in refused.value.remedy
    driver.exportable = True
    driver.fail["export_handle"] = "CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(AttachRefused, match="CUDA_ERROR_INVALID_VALUE"):
        export_cuda_memory(0, allocation.data_ptr(), 8, driver=driver)


def test_export_refuses_memory_that_leaves_its_allocation(machine: Machine, driver: FakeDriver) -> None:
    _, allocation = machine.allocate(1000)
    with pytest.raises(AttachRefused) as refused:
        export_cuda_memory(0, allocation.data_ptr() + 1, 1000, driver=driver)
    assert refused.value.refusal is RefusalReason.MEMORY_SIZE


def test_export_refuses_host_tensors(driver: FakeDriver) -> None:
    with pytest.raises(AttachRefused) as refused:
        export_cuda_tensor(torch.zeros(8), driver=driver)
    assert refused.value.refusal is RefusalReason.MEMORY_KIND


def test_each_handle_is_opened_once_and_closed_with_its_last_user(
    machine: Machine, driver: FakeDriver, handles: OpenHandles
) -> None:
    handle, allocation = machine.allocate(1000)
    other, _ = machine.allocate(64)
    memories = [described(handle, 0, 400), described(handle, 400, 600), described(other, 4, 60)]
    first = map_memories(memories, [], device_uuid=UUIDS[0], handles=handles)
    second = map_memories(memories[:1], [], device_uuid=UUIDS[0].lower(), handles=handles)
    assert driver.opened == [handle, other]
    assert torch.equal(first.tensors[1], allocation[400:])
    assert first.tensors[1].data_ptr() == allocation.data_ptr() + 400
    first.close()
    first.close()
    assert driver.closed == [machine.allocations[other].data_ptr()]
    second.close()
    assert driver.closed[1:] == [allocation.data_ptr()]
    assert len(handles) == 0
    map_memories(memories[:1], [], device_uuid=UUIDS[0], handles=handles).close()
    assert driver.opened == [handle, other, handle]


@pytest.mark.parametrize(
    ("memory", "uuid", "refusal"),
    [
        pytest.param((0, 1001, UUIDS[0]), UUIDS[0], RefusalReason.MEMORY_SIZE, id="too large"),
        pytest.param((1000, 1, UUIDS[0]), UUIDS[0], RefusalReason.MEMORY_SIZE, id="behind the end"),
        pytest.param((0, 8, UUIDS[1]), UUIDS[0], RefusalReason.GPU_NOT_VISIBLE, id="another GPU"),
        pytest.param((0, 8, "GPU-dead"), "GPU-dead", RefusalReason.GPU_NOT_VISIBLE, id="invisible GPU"),
        pytest.param((0, 8, UUIDS[0]), None, RefusalReason.MEMORY_KIND, id="worker of host pools"),
    ],
)
def test_import_refuses_and_leaves_nothing_mapped(
    memory: tuple[int, int, str], uuid: str | None, refusal: RefusalReason, machine: Machine, handles: OpenHandles
) -> None:
    handle, _ = machine.allocate(1000)
    good, _ = machine.allocate(16)
    memories = [described(good, 0, 16, memory[2]), described(handle, *memory)]
    with pytest.raises(AttachRefused) as refused:
        map_memories(memories, [], device_uuid=uuid, handles=handles)
    assert refused.value.refusal is refusal
    assert refused.value.remedy
    assert len(handles) == 0


@pytest.mark.parametrize("call", ["open_handle", "address_range", "uuids"])
def test_driver_failures_name_the_error_and_leave_nothing_open(
    call: str, machine: Machine, driver: FakeDriver, handles: OpenHandles
) -> None:
    handle, _ = machine.allocate(1000)
    driver.fail[call] = "CUDA_ERROR_UNKNOWN"
    with pytest.raises(AttachRefused, match="CUDA_ERROR_UNKNOWN") as refused:
        map_memories([described(handle, 0, 8)], [], device_uuid=UUIDS[0], handles=handles)
    assert refused.value.refusal in (RefusalReason.HANDLE_INVALID, RefusalReason.GPU_NOT_VISIBLE)
    assert len(handles) == 0
    assert len(driver.closed) == len(driver.opened)


def test_unknown_handle_is_refused(handles: OpenHandles) -> None:
    with pytest.raises(AttachRefused) as refused:
        map_memories([described(bytes(64), 0, 8)], [], device_uuid=UUIDS[0], handles=handles)
    assert refused.value.refusal is RefusalReason.HANDLE_INVALID


def test_failure_to_unmap_is_told_after_all_were_tried(
    machine: Machine, driver: FakeDriver, handles: OpenHandles
) -> None:
    memories = [described(machine.allocate(8)[0], 0, 8) for _ in range(3)]
    pool = map_memories(memories, [], device_uuid=UUIDS[0], handles=handles)
    driver.fail["close_handle"] = "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(BackendError, match="3 memories"):
        pool.close()
    assert len(driver.closed) == 3


def test_host_memory_in_a_gpu_attachment_is_refused(handles: OpenHandles) -> None:
    with pytest.raises(AttachRefused) as refused:
        map_memories([HostShmMemory(fd_index=1, offset=0, size=8)], [0, 1], device_uuid=UUIDS[0], handles=handles)
    assert refused.value.refusal is RefusalReason.MEMORY_KIND

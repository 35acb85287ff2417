"""Host memory by descriptor: bytes are seen across mappings, bounds hold, the mapping is read-only."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest
import torch

from canaryd.client.memory import ExportedMemory, export_host_tensor
from canaryd.errors import AttachRefused, RefusalReason
from canaryd.pool.mapping import map_memories
from canaryd.wire.messages import HostShmMemory


@pytest.fixture
def tensor(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (5, 1237), dtype=torch.uint8, generator=generator)


@pytest.fixture
def exported(tensor: torch.Tensor) -> Iterator[ExportedMemory]:
    memory = export_host_tensor(tensor)
    yield memory
    memory.close()


def at(exported: ExportedMemory, offset: int, size: int, fd_index: int = 1) -> HostShmMemory:
    assert exported.fd is not None
    return HostShmMemory(fd_index=fd_index, offset=offset, size=size)


def test_export_shares_in_place_and_views_follow(tensor: torch.Tensor) -> None:
    view = tensor[1]
    expected = tensor.clone()
    with_fd = export_host_tensor(tensor)
    assert torch.equal(tensor, expected)
    pool = map_memories([with_fd.memory], [-1, with_fd.fd or -1], device_uuid=None)
    view[3] = ~view[3]
    expected[1, 3] = ~expected[1, 3]
    assert torch.equal(pool.tensors[0].view(5, 1237), expected)
    pool.close()
    with_fd.close()
    assert torch.equal(tensor, expected)


def test_export_of_a_part_names_its_offset(tensor: torch.Tensor) -> None:
    part = export_host_tensor(tensor[2:4])
    assert (part.memory.offset, part.memory.size) == (2 * 1237, 2 * 1237)
    pool = map_memories([part.memory], [-1, part.fd or -1], device_uuid=None)
    assert torch.equal(pool.tensors[0], tensor[2:4].reshape(-1))
    part.close()


def test_wide_elements_are_exported_as_bytes() -> None:
    wide = torch.arange(300, dtype=torch.int32)[100:]
    exported = export_host_tensor(wide)
    assert (exported.memory.offset, exported.memory.size) == (400, 800)
    pool = map_memories([exported.memory], [-1, exported.fd or -1], device_uuid=None)
    assert torch.equal(pool.tensors[0].view(torch.int32), wide)
    exported.close()


def test_equal_bytes_have_equal_addresses(exported: ExportedMemory) -> None:
    fd = exported.fd or -1
    other = os.dup(fd)
    pool = map_memories([at(exported, 0, 100), at(exported, 40, 60, 2)], [-1, fd, other], device_uuid=None)
    os.close(other)
    assert pool.tensors[1].data_ptr() == pool.tensors[0].data_ptr() + 40


@pytest.mark.parametrize(
    ("offset", "size", "fd_index", "refusal"),
    [
        (0, 5 * 1237 + 1, 1, RefusalReason.MEMORY_SIZE),
        (5 * 1237, 4, 1, RefusalReason.MEMORY_SIZE),
        (1 << 47, 4, 1, RefusalReason.MEMORY_SIZE),
        (0, 4, 2, RefusalReason.HANDLE_INVALID),
        (0, 4, 0, RefusalReason.HANDLE_INVALID),
    ],
)
def test_bounds_are_proven(
    exported: ExportedMemory, offset: int, size: int, fd_index: int, refusal: RefusalReason
) -> None:
    with pytest.raises(AttachRefused) as refused:
        map_memories([at(exported, offset, size, fd_index)], [-1, exported.fd or -1], device_uuid=None)
    assert refused.value.refusal is refusal


def test_descriptors_that_cannot_be_mapped_are_refused(exported: ExportedMemory) -> None:
    reader, writer = os.pipe()
    closed = os.dup(reader)
    os.close(closed)
    for fd in (reader, closed):
        with pytest.raises(AttachRefused):
            map_memories([at(exported, 0, 4)], [-1, fd], device_uuid=None)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("bad", [torch.zeros(4, 4).t(), torch.zeros(0), torch.zeros(4, device="meta")])
def test_only_flat_host_tensors_are_exported(bad: torch.Tensor) -> None:
    with pytest.raises(AttachRefused):
        export_host_tensor(bad)


def test_mapping_is_read_only(exported: ExportedMemory) -> None:
    pool = map_memories([at(exported, 0, 100)], [-1, exported.fd or -1], device_uuid=None)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # the crash is what is wanted
        pool.tensors[0][0] = 1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)

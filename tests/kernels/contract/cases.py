"""Random inputs of the canary launchers, as Python lists for the oracle and as tensors for the launchers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from canary_kernels import CanaryLaunchTag, RealKvHashMode, RealKvSource, VerifyOrWriteContext

from tests.kernels.contract import oracle

POISON_64 = oracle.signed(0xA5A5A5A5A5A5A5A5)
POISON_32 = 0xA5A5A5A5 - (1 << 32)
HUGE = (oracle.BAD, -(1 << 63), 1 << 40, -(1 << 40))


def poisoned(*shape: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> torch.Tensor:
    """A tensor of 0xA5 bytes."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.view(torch.uint8).fill_(0xA5)
    return tensor


def int64(values: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)


def int32(values: Sequence[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def table_tensor(table: Sequence[Sequence[int]], width: int, device: str) -> torch.Tensor:
    return torch.tensor([list(row) for row in table], dtype=torch.int32, device=device).reshape(len(table), width)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, spread out over poisoned memory in every dimension."""
    spread = poisoned(*(2 * size + 1 for size in tensor.shape), dtype=tensor.dtype, device=str(tensor.device))
    view = spread[tuple(slice(1, None, 2) for _ in tensor.shape)]
    view.copy_(tensor)
    return view


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A canary buffer and its sources, in both forms."""

    buffer: list[bytes]
    stride: int
    mode: RealKvHashMode
    sources: list[oracle.Source]
    """What the mode hashes."""
    source_args: list[tuple[torch.Tensor, int, int, int]]

    def context(
        self, device: str, *, ring_rows: int, index: int, kind: CanaryLaunchTag, check_positions: bool = False
    ) -> VerifyOrWriteContext:
        data = torch.frombuffer(bytearray(b"".join(self.buffer)), dtype=torch.uint8)
        return VerifyOrWriteContext(
            canary_buf=data.reshape(len(self.buffer), self.stride).to(device),
            kernel_kind=kind,
            violation_ring=poisoned(ring_rows, 8, device=device),
            violation_write_index=int32([index], device),
            slot_run_counter=int64([1000], device),
            kernel_run_counter=int64([7], device),
            real_kv_sources=tuple(
                RealKvSource(tensor=_moved(rows, device), page_size=page, num_bytes_per_token=token, read_bytes=read)
                for rows, page, token, read in self.source_args
            ),
            real_kv_hash_mode=self.mode,
            enable_chain_position_assert=int32([int(check_positions)], device),
        )


def _moved(rows: torch.Tensor, device: str) -> torch.Tensor:
    """`rows` on the device, with its row stride."""
    if device == "cpu":
        return rows
    base = torch.empty(rows.shape[0] * rows.stride(0), dtype=rows.dtype, device=device)
    moved = base.as_strided(rows.shape, rows.stride())
    moved.copy_(rows)
    return moved


def aligned_rows(rng: random.Random, *, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes [rows, width bytes], rows a multiple of 16 bytes apart and wider than they need to be."""
    row_stride = width + 16 * rng.randrange(3)
    memory = torch.frombuffer(bytearray(rng.randbytes(rows * row_stride + 16)), dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    block = memory[start : start + rows * row_stride].reshape(rows, row_stride)
    return block[:, :width].view(dtype)


def draw_pool(rng: random.Random) -> Pool:
    """A pool of a few slots with random records; about half of its real-KV hashes are right."""
    num_slots = rng.randrange(1, 40)
    stride = rng.choice((32, 33, 37, 40, 64))
    mode = rng.choice((RealKvHashMode.ALL, RealKvHashMode.PARTIAL, RealKvHashMode.NONE))
    sources, source_args = [], []
    for _ in range(rng.randrange(5)):
        page, token = rng.randrange(1, 6), 16 * rng.randrange(1, 12)
        read = 16 * rng.randrange(1, token // 16 + 1)
        count = max(1, -(-num_slots // page) + rng.choice((0, 0, 1, -1)))
        dtype = rng.choice((torch.uint8, torch.bfloat16, torch.float32))
        rows = aligned_rows(rng, rows=count, width=page * token + 16 * rng.randrange(2), dtype=dtype)
        data = [bytes(row.tolist()) for row in rows.view(torch.uint8)]
        hashed = 16 if mode == RealKvHashMode.PARTIAL else read
        if mode != RealKvHashMode.NONE:
            sources.append(oracle.Source(rows=data, page_size=page, token_bytes=token, read_bytes=hashed))
        source_args.append((rows, page, token, read))
    buffer = [bytearray(rng.randbytes(stride)) for _ in range(num_slots)]
    for slot in range(oracle.slot_limit(buffer, sources)):
        if rng.random() < 0.5:
            buffer[slot][24:32] = oracle.real_hash(sources, slot).to_bytes(8, "little")
        if rng.random() < 0.5:  # small numbers, so that expectations may match
            buffer[slot][0:8] = rng.randrange(4).to_bytes(8, "little")
            buffer[slot][8:16] = rng.randrange(4).to_bytes(8, "little")
    for slot in rng.sample(range(num_slots), num_slots // 2):
        previous = rng.randrange(num_slots)
        after = oracle.hash_after(oracle.record_at(buffer, previous)) if slot % 3 else oracle.HEAD
        buffer[slot][16:24] = after.to_bytes(8, "little")
    return Pool(
        buffer=[bytes(slot) for slot in buffer], stride=stride, mode=mode, sources=sources, source_args=source_args
    )


def draw_slot(rng: random.Random, num_slots: int) -> int:
    """Mostly a slot; sometimes padding, negative, just outside or far outside."""
    roll = rng.random()
    if roll < 0.75:
        return rng.randrange(num_slots)
    return rng.choice((0, -1, -2, num_slots, num_slots + 1, num_slots - 1, *HUGE))


def draw_ring(rng: random.Random) -> tuple[int, int]:
    """Rows of the ring, and the counter at the start."""
    if rng.random() < 0.6:
        return 500, 0
    return rng.choice((0, 1, 7, 500)), rng.choice((0, 3, -2, (1 << 30) - 2, 1 << 30, (1 << 31) - 1))


def assert_sinks(context: VerifyOrWriteContext, start: int, outcome: oracle.Outcome) -> None:
    """Ring, counter and both health counters are what the oracle says, the ring's order aside."""
    ring = [tuple(row) for row in context.violation_ring.tolist()]
    expected = list(outcome.rows)
    stop = start + len(expected) if start < oracle.COUNTER_MAX else start
    kept = range(max(0, start), min(len(ring), stop))
    stored = [ring[place] for place in kept]
    if len(stored) == len(expected):
        assert sorted(stored) == sorted(expected)
    for row in stored:  # the ring was too small: which rows it has is open
        expected.remove(row)
    untouched = [row for place, row in enumerate(ring) if place not in kept]
    assert untouched == [(POISON_64,) * 8] * len(untouched)
    assert context.violation_write_index.tolist() == [oracle.counter_after(start, len(outcome.rows))]
    assert context.slot_run_counter.tolist() == [1000 + outcome.slots_run]
    assert context.kernel_run_counter.tolist() == [8]

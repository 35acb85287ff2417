"""Launch the contract kernels on tensors between protected pages; a program for `test_contract_bounds.py`.

Usage: `guarded.py BACKEND SEED [beyond]`. One access outside any tensor ends the process with SIGSEGV. `beyond` lies to
the verify kernel about the pool's size, to show that it would.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from canary_kernels import (
    CanaryLaunchTag,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    launch_canary_plan_kernels,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
    launch_plan_entries_kernel,
    launch_scatter_req_token_ids_kernel,
)

from tests.kernels.contract import test_contract_plan, test_contract_verify, test_contract_write
from tests.kernels.contract.cases import HUGE, Pool, draw_pool, draw_slot, int32, int64, table_tensor

PAGE = mmap.PAGESIZE
ROUNDS = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Fence:
    """Allocates tensors that touch a protected page at their end, or at their start; pages are never freed."""

    def __init__(self, *, at_end: bool) -> None:
        self._at_end = at_end

    def memory(self, size: int) -> torch.Tensor:
        """uint8 [size], filled with 0xA5."""
        inner = max(1, -(-size // PAGE)) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = _libc.mmap(None, inner + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        for page in (base, base + PAGE + inner):
            if _libc.mprotect(page, PAGE, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        start = base + PAGE + (inner - size if self._at_end else 0)
        if not size:
            return torch.zeros(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=torch.uint8).fill_(0xA5)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous tensor, or of packed rows that are further apart."""
        step = tensor.element_size()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        memory = self.memory(extent * step if tensor.numel() else 0).view(tensor.dtype)
        placed = memory.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else tensor
        return placed.copy_(tensor)

    def empty(self, size: Any, *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        """Stands in for `torch.empty`."""
        shape = torch.Size((size,) if isinstance(size, int) else size)
        return self.memory(shape.numel() * dtype.itemsize).view(dtype).reshape(shape)

    def full(self, size: Any, value: int, *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        """Stands in for `torch.full`."""
        return self.empty(size, dtype=dtype).fill_(value)

    def context(self, pool: Pool, rng: random.Random) -> VerifyOrWriteContext:
        plain = pool.context(
            "cpu",
            ring_rows=rng.choice((0, 3, 40)),
            index=rng.choice((0, -2, (1 << 30) - 1)),
            kind=CanaryLaunchTag.TAIL_V_FULL,
            check_positions=True,
        )
        return VerifyOrWriteContext(
            canary_buf=self.place(plain.canary_buf),
            kernel_kind=plain.kernel_kind,
            violation_ring=self.place(plain.violation_ring),
            violation_write_index=self.place(plain.violation_write_index),
            slot_run_counter=self.place(plain.slot_run_counter),
            kernel_run_counter=self.place(plain.kernel_run_counter),
            real_kv_sources=tuple(
                RealKvSource(
                    tensor=self.place(source.tensor),
                    page_size=source.page_size,
                    num_bytes_per_token=source.num_bytes_per_token,
                    read_bytes=source.read_bytes,
                )
                for source in plain.real_kv_sources
            ),
            real_kv_hash_mode=plain.real_kv_hash_mode,
            enable_chain_position_assert=self.place(plain.enable_chain_position_assert),
        )


def run_plan(fence: Fence, rng: random.Random, backend: str) -> None:
    batch = test_contract_plan.draw_batch(rng, wild=True)
    verify, write = test_contract_plan.poisoned_plans(batch, "cpu")
    rows, prefixes = fence.place(int64(batch.rows)), fence.place(int64(batch.prefixes))
    table = fence.place(table_tensor(batch.table, batch.width, "cpu"))
    mapping = None if batch.mapping is None else fence.place(int64(batch.mapping))
    tokens = None if batch.tokens is None else fence.place(table_tensor(batch.tokens, batch.tokens_width, "cpu"))
    lens = fence.place(int64(batch.valid_lens))
    placed = VerifyPlan(**{name: fence.place(tensor) for name, tensor in vars(verify).items()})
    launch_canary_plan_kernels(
        verify_plan_out=placed,
        write_plan_out=type(write)(**{name: fence.place(tensor) for name, tensor in vars(write).items()}),
        req_pool_indices=rows,
        prefix_lens=prefixes,
        extend_seq_lens=fence.place(int64(batch.extends)),
        req_to_token=table,
        swa_window_size=batch.window,
        full_to_swa_index_mapping=mapping,
        verify_capacity=batch.capacity,
        req_to_verify_expected_tokens=tokens,
        req_to_verify_expected_tokens_valid_lens=lens,
        kv_token_id_vs_position_offset=batch.offset,
        backend=backend,
    )
    # offsets that nobody sorted, and a total that does not fit them
    scratch = [rng.choice((rng.randrange(batch.capacity), *HUGE)) for _ in batch.rows]
    launch_plan_entries_kernel(
        req_pool_indices=rows,
        prefix_lens=prefixes,
        req_to_token=table,
        full_to_swa_index_mapping=mapping,
        verify_offsets_scratch=fence.place(int64([*scratch, rng.randrange(batch.capacity + 2)])),
        verify_enable=fence.place(int32([1])),
        req_to_verify_expected_tokens=tokens,
        req_to_verify_expected_tokens_valid_lens=lens,
        out_verify_slot_indices=placed.verify_slot_indices,
        out_verify_expected_tokens=placed.verify_expected_tokens,
        out_verify_expected_positions=placed.verify_expected_positions,
        out_verify_prev_slot_indices=placed.verify_prev_slot_indices,
        kv_token_id_vs_position_offset=batch.offset,
        swa_window_size=batch.window,
        backend=backend,
    )


def run_verify(fence: Fence, rng: random.Random, backend: str) -> None:
    pool = draw_pool(rng)
    entries = [test_contract_verify.draw_entry(rng, pool) for _ in range(rng.choice((1, 7, 130)))]
    plan = test_contract_verify.plan_of(entries, rng.choice((len(entries), 1 << 30)), 1, "cpu")
    launch_canary_verify_kernel(
        context=fence.context(pool, rng),
        plan=VerifyPlan(**{name: fence.place(tensor) for name, tensor in vars(plan).items()}),
        check_verify_expected_token=True,
        backend=backend,
    )


def run_write(fence: Fence, rng: random.Random, backend: str) -> None:
    pool = draw_pool(rng)
    num_tokens, requests = rng.choice((0, 1, 33)), rng.randrange(1, 5)
    plan = test_contract_write.plan_of(
        test_contract_write.draw_offsets(rng, requests, num_tokens),
        [draw_slot(rng, len(pool.buffer)) for _ in range(requests)],
        rng.choice((requests, 1 << 30)),
        "cpu",
    )
    vector = fence.place(int64(range(num_tokens)))
    launch_canary_write_kernel(
        context=fence.context(pool, rng),
        plan=type(plan)(**{name: fence.place(tensor) for name, tensor in vars(plan).items()}),
        input_ids=vector,
        positions=vector,
        out_cache_loc=fence.place(int64([draw_slot(rng, len(pool.buffer)) for _ in range(num_tokens)])),
        enable_write_input_assert=True,
        expected_input_tokens=vector,
        expected_input_positions=vector,
        backend=backend,
    )


def run_scatter(fence: Fence, rng: random.Random, backend: str) -> None:
    num_tokens, bs, max_reqs, width = rng.choice((1, 9, 300)), rng.randrange(1, 9), 9, rng.randrange(1, 40)
    offsets = [rng.choice((rng.randrange(num_tokens + 1), num_tokens + 7, *HUGE)) for _ in range(bs + 1)]
    launch_scatter_req_token_ids_kernel(
        flat_in=fence.place(int64(range(num_tokens))),
        offsets=fence.place(int64(sorted(offsets) if rng.random() < 0.7 else offsets)),
        req_pool_indices=fence.place(int64([rng.choice((rng.randrange(max_reqs), *HUGE)) for _ in range(bs)])),
        pool_out=fence.place(torch.zeros(max_reqs, width, dtype=torch.int32)),
        backend=backend,
    )


def read_beyond(fence: Fence) -> None:
    """A slot beyond the buffer, and a kernel that is told that the buffer has it."""
    from canary_kernels.device import verify

    verify.slot_limit = lambda num_slots, sources: num_slots + PAGE
    pool = Pool(buffer=[bytes(32)] * 4, stride=32, mode=0, sources=[], source_args=[])
    plan = test_contract_verify.plan_of([(4 + PAGE // 64, 0, 0, -1)], 1, 1, "cpu")
    launch_canary_verify_kernel(
        context=fence.context(pool, random.Random(0)), plan=plan, check_verify_expected_token=False, backend="triton"
    )


def main() -> None:
    backend, seed = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    rng = random.Random(seed)
    runs: tuple[Callable[[Fence, random.Random, str], None], ...] = (run_plan, run_verify, run_write, run_scatter)
    for at_end in (True, False):
        fence = Fence(at_end=at_end)
        torch.empty, torch.full = fence.empty, fence.full  # the launchers' own scratch is fenced too
        if sys.argv[3:] == ["beyond"]:
            read_beyond(fence)
        for _ in range(ROUNDS):
            for run in runs:
                run(fence, rng, backend)
    print(f"fenced {ROUNDS * 2} rounds")
    sys.stdout.flush()
    os._exit(0)  # tensors over fenced memory are gone with the process


if __name__ == "__main__":
    main()

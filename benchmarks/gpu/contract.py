"""The contract's plan, verify and write over one batch of requests, as the in-engine canary runs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from canary_kernels import (
    CanaryLaunchTag,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    launch_canary_plan_kernels,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
)

from benchmarks.gpu.workload import Backend, Place, Workload, sorted_rows

SETS = 4
RING_ROWS = 1024
PLAN_ENTRY_BYTES = 32
VERIFY_ENTRY_BYTES = 24
"""Columns that verify reads while tokens are not compared: slot, position, previous slot."""
RECORD_BYTES = 32


class Batch:
    """`bs` requests of `prefix` tokens that are there and `extend` that are written; slots at random, 0 is padding."""

    def __init__(
        self, place: Place, *, bs: int, prefix: int, extend: int, stride: int = 32, source_bytes: tuple[int, ...] = ()
    ) -> None:
        self.bs, self.prefix, self.extend = bs, prefix, extend
        length = prefix + extend
        tokens = bs * length
        generator = place.generator()
        order = torch.randperm(tokens, generator=generator, device=place.device) + 1
        self.table = torch.zeros((bs + 1, length), dtype=torch.int32, device=place.device)
        self.table[1:] = order.reshape(bs, length)
        self.rows = torch.arange(1, bs + 1, device=place.device)
        self.prefixes = torch.full((bs,), prefix, dtype=torch.int64, device=place.device)
        self.extends = torch.full((bs,), extend, dtype=torch.int64, device=place.device)
        written = self.table[1:, prefix:].reshape(-1).long()
        self.slots = written.contiguous()
        self.ids = torch.randint(0, 1 << 17, (bs * extend,), generator=generator, device=place.device)
        self.positions = torch.arange(prefix, length, device=place.device).repeat(bs)
        self.capacity = max(1, bs * prefix)
        self.verify_plan = VerifyPlan.allocate(verify_capacity=self.capacity, device=place.device)
        self.write_plan = WritePlan.allocate(write_req_capacity=bs, device=place.device)
        self.context = VerifyOrWriteContext(
            canary_buf=torch.zeros((tokens + 1, stride), dtype=torch.uint8, device=place.device),
            kernel_kind=CanaryLaunchTag.SWEEP_K_FULL,
            violation_ring=torch.zeros((RING_ROWS, 8), dtype=torch.int64, device=place.device),
            violation_write_index=torch.zeros(1, dtype=torch.int32, device=place.device),
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=place.device),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=place.device),
            real_kv_sources=tuple(
                RealKvSource(
                    tensor=place.arena[number * (tokens + 1) * size :][: (tokens + 1) * size].view(tokens + 1, size),
                    page_size=1,
                    num_bytes_per_token=size,
                    read_bytes=size,
                )
                for number, size in enumerate(source_bytes)
            ),
            real_kv_hash_mode=RealKvHashMode.ALL if source_bytes else RealKvHashMode.NONE,
            enable_chain_position_assert=torch.zeros(1, dtype=torch.int32, device=place.device),
        )

    def plan(self, backend: Backend) -> None:
        """Fills both plans."""
        launch_canary_plan_kernels(
            verify_plan_out=self.verify_plan,
            write_plan_out=self.write_plan,
            req_pool_indices=self.rows,
            prefix_lens=self.prefixes,
            extend_seq_lens=self.extends,
            req_to_token=self.table,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=self.capacity,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
            backend=backend,
        )

    def write(self, backend: Backend) -> None:
        """Writes the records of the new tokens."""
        launch_canary_write_kernel(
            context=self.context,
            plan=self.write_plan,
            input_ids=self.ids,
            positions=self.positions,
            out_cache_loc=self.slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
            backend=backend,
        )

    def verify(self, backend: Backend) -> None:
        """Verifies the entries of the plan."""
        launch_canary_verify_kernel(
            context=self.context, plan=self.verify_plan, check_verify_expected_token=False, backend=backend
        )

    def plans(self) -> list[torch.Tensor]:
        """All tensors of both plans."""
        return [*vars(self.verify_plan).values(), *vars(self.write_plan).values()]

    def sinks(self) -> list[torch.Tensor]:
        """Counters, and violation rows in order."""
        context = self.context
        return [
            context.slot_run_counter,
            context.kernel_run_counter,
            *sorted_rows(context.violation_ring, context.violation_write_index),
        ]


class PlanPass:
    """`bs` requests with `prefix` tokens each."""

    sets = SETS

    def __init__(self, place: Place, *, bs: int, prefix: int) -> None:
        self._batches = [Batch(place, bs=bs, prefix=prefix, extend=1) for _ in range(SETS)]
        for batch in self._batches:
            for tensor in batch.plans():
                tensor.fill_(-1)
        # one int32 slot read, four int64 columns written per entry
        self.bytes_moved = bs * prefix * (4 + PLAN_ENTRY_BYTES)

    def launch(self, number: int, backend: Backend) -> None:
        """See `Workload`."""
        self._batches[number].plan(backend)

    def results(self, number: int) -> list[torch.Tensor]:
        """See `Workload`."""
        return self._batches[number].plans()


class VerifyPass:
    """Verify of `bs` x `prefix` entries that are all right (one in the first set is not)."""

    def __init__(self, place: Place, *, bs: int, prefix: int, stride: int, source_bytes: tuple[int, ...]) -> None:
        self.sets = 1 if source_bytes else SETS
        self._batches = []
        backend: Backend = "reference" if place.device.type == "cpu" else "triton"
        for _ in range(self.sets):
            writer = Batch(place, bs=bs, prefix=0, extend=prefix, stride=stride, source_bytes=source_bytes)
            writer.plan(backend)
            writer.write(backend)
            reader = Batch(place, bs=bs, prefix=prefix, extend=0, stride=stride, source_bytes=source_bytes)
            reader.context.canary_buf.copy_(writer.context.canary_buf)
            reader.plan(backend)
            self._batches.append(reader)
        self._batches[0].context.canary_buf[bs * prefix // 2, 8] ^= 1
        # each record is one sector; its neighbour's is in the L1 where entries follow each other
        self.bytes_moved = bs * prefix * (VERIFY_ENTRY_BYTES + RECORD_BYTES + sum(source_bytes))

    def launch(self, number: int, backend: Backend) -> None:
        """See `Workload`."""
        self._batches[number].verify(backend)

    def results(self, number: int) -> list[torch.Tensor]:
        """See `Workload`."""
        return self._batches[number].sinks()


class WritePass:
    """Write of `bs` x `extend` tokens."""

    sets = SETS

    def __init__(self, place: Place, *, bs: int, extend: int, source_bytes: tuple[int, ...]) -> None:
        self._batches = []
        step = (bs * extend + 1) * sum(source_bytes)
        for number in range(SETS):
            own = Place(device=place.device, arena=place.arena[number * step :], seed=place.seed)
            self._batches.append(Batch(own, bs=bs, prefix=0, extend=extend, source_bytes=source_bytes))
        for batch in self._batches:
            batch.plan("reference" if place.device.type == "cpu" else "triton")
        self.bytes_moved = bs * extend * (24 + RECORD_BYTES + sum(source_bytes))

    def launch(self, number: int, backend: Backend) -> None:
        """See `Workload`."""
        self._batches[number].write(backend)

    def results(self, number: int) -> list[torch.Tensor]:
        """See `Workload`."""
        return [self._batches[number].context.canary_buf, *self._batches[number].sinks()]


def plan_pass(*, prefix: int) -> Callable[[Place, int], Workload]:
    """`size` entries in requests of `prefix`."""
    return lambda place, size: PlanPass(place, bs=max(1, size // prefix), prefix=min(prefix, size))


def verify_pass(
    *, prefix: int, stride: int = 32, source_bytes: tuple[int, ...] = ()
) -> Callable[[Place, int], Workload]:
    """`size` entries in requests of `prefix`."""
    return lambda place, size: VerifyPass(
        place, bs=max(1, size // prefix), prefix=min(prefix, size), stride=stride, source_bytes=source_bytes
    )


def write_pass(*, extend: int, source_bytes: tuple[int, ...]) -> Callable[[Place, int], Workload]:
    """`size` tokens in requests of `extend`."""
    return lambda place, size: WritePass(
        place, bs=max(1, size // extend), extend=min(extend, size), source_bytes=source_bytes
    )

"""Write and verify of slots beyond 4 GiB and beyond 2^31 elements, the last slot included.

As in the native tests: one large piece of memory on a GPU, expected values from small tensors with the same slots, and
a small piece of host memory that proves the tests under the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from canary_kernels import (
    CanaryLaunchTag,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
)

BEYOND = 1 << 20
RECORD_BYTES = 32
SOURCE_BYTES = 16
SLOTS = 4


@pytest.fixture(
    scope="module", params=[("cpu", 0), pytest.param(("cuda", 1 << 34), marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def memory(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    """Zeros, 1 MiB more than 2^31 elements of 8 bytes on a GPU."""
    device, size = request.param
    yield torch.zeros(size + BEYOND, dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Side:
    """A canary buffer and a source, and the slots of it that are written."""

    context: VerifyOrWriteContext
    slots: list[int]
    backend: str

    @classmethod
    def over(cls, buffer: torch.Tensor, source: torch.Tensor, slots: list[int], backend: str) -> Side:
        device = buffer.device
        return cls(
            context=VerifyOrWriteContext(
                canary_buf=buffer.view(-1, RECORD_BYTES),
                kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
                violation_ring=torch.zeros((SLOTS, 8), dtype=torch.int64, device=device),
                violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
                slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
                kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
                real_kv_sources=(
                    RealKvSource(
                        tensor=source.view(-1, SOURCE_BYTES),
                        page_size=1,
                        num_bytes_per_token=SOURCE_BYTES,
                        read_bytes=SOURCE_BYTES,
                    ),
                ),
                real_kv_hash_mode=RealKvHashMode.ALL,
                enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=device),
            ),
            slots=slots,
            backend=backend,
        )

    def write(self, tokens: torch.Tensor) -> None:
        """One request: a seed from the first slot, then the others."""
        device = self.context.canary_buf.device
        plan = WritePlan.allocate(write_req_capacity=2, device=device)
        plan.write_offsets.copy_(torch.tensor([0, 1, SLOTS]))
        plan.write_seed_slot_indices.copy_(torch.tensor([-1, self.slots[-1]]))
        plan.write_num_valid_reqs.fill_(2)
        launch_canary_write_kernel(
            context=self.context,
            plan=plan,
            input_ids=tokens.to(device),
            positions=torch.tensor([0, 1, 2, 3], device=device),
            out_cache_loc=torch.tensor(self.slots, device=device),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
            backend=self.backend,  # type: ignore[arg-type]
        )

    def verify(self) -> list[list[int]]:
        """Violations of the written slots, the second request's chain included; slots by their place in `slots`."""
        device = self.context.canary_buf.device
        plan = VerifyPlan.allocate(verify_capacity=SLOTS, device=device)
        plan.verify_slot_indices.copy_(torch.tensor(self.slots))
        plan.verify_expected_tokens.fill_(-1)
        plan.verify_expected_positions.copy_(torch.arange(SLOTS))
        plan.verify_prev_slot_indices.copy_(torch.tensor([-1, self.slots[-1], *self.slots[1:-1]]))
        plan.verify_num_valid.fill_(SLOTS)
        plan.enable.fill_(1)
        self.context.violation_write_index.zero_()
        launch_canary_verify_kernel(
            context=self.context, plan=plan, check_verify_expected_token=False, backend=self.backend
        )
        rows = self.context.violation_ring[: int(self.context.violation_write_index)].tolist()
        return sorted([row[0], self.slots.index(row[1]), *row[2:]] for row in rows)


def test_write_and_verify(memory: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = memory.numel() // RECORD_BYTES
    # the source lies in the first half of the same memory, where none of these slots has its record
    high = [count - 1, count - 7, count * 3 // 4 + 1, count - 2]
    source = memory[: count * SOURCE_BYTES]
    content = torch.randint(256, (SLOTS, SOURCE_BYTES), generator=generator, dtype=torch.uint8)
    small_source = torch.cat((torch.zeros(1, SOURCE_BYTES, dtype=torch.uint8), content)).view(-1)
    source.view(-1, SOURCE_BYTES)[high] = content.to(memory.device)
    tokens = torch.randint(1 << 17, (SLOTS,), generator=generator)
    large = Side.over(memory[: count * RECORD_BYTES], source, high, "triton")
    low = list(range(1, SLOTS + 1))  # slot 0 is padding
    small_buffer = torch.zeros((SLOTS + 1) * RECORD_BYTES, dtype=torch.uint8)
    small = Side.over(small_buffer, small_source, low, "reference")
    for side in (large, small):
        side.write(tokens)
    records = large.context.canary_buf
    written = records[high].cpu()
    sound = large.verify(), small.verify()
    for slots, held in ((high, source), (low, small_source)):
        held.view(-1, SOURCE_BYTES)[slots[0], 5] ^= 1
        held.view(-1, SOURCE_BYTES)[slots[2], 0] ^= 1
    damaged = large.verify(), small.verify()
    wrap = (1 << 32) // RECORD_BYTES
    strays = records[[slot % wrap for slot in high if slot >= wrap]].cpu()
    records[high] = 0
    source.view(-1, SOURCE_BYTES)[high] = 0
    assert torch.equal(written, small.context.canary_buf[1:])
    assert sound[0] == sound[1]
    assert damaged[0] == damaged[1]
    assert len(damaged[1]) == len(sound[1]) + 2
    assert not strays.any()

"""What only a GPU can show: launches inside a CUDA graph, how often kernels compile, and concurrent programs."""

from __future__ import annotations

import pytest
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

from tests.kernels.contract.cases import int32, int64, poisoned

pytestmark = pytest.mark.gpu


class Step:
    """`bs` requests of `length` tokens each over one layer: written, then planned and verified, all on the GPU."""

    def __init__(self, *, bs: int, length: int, source_bytes: int = 64) -> None:
        self.bs, self.length = bs, length
        tokens = bs * length
        generator = torch.Generator(device="cuda").manual_seed(bs * 1000 + length)
        layer = torch.randint(256, (tokens + 1, source_bytes), generator=generator, device="cuda", dtype=torch.uint8)
        self.source = RealKvSource(tensor=layer, page_size=1, num_bytes_per_token=source_bytes, read_bytes=source_bytes)
        self.context = VerifyOrWriteContext(
            canary_buf=poisoned(tokens + 1, 32, dtype=torch.uint8, device="cuda"),
            kernel_kind=CanaryLaunchTag.SWEEP_K_FULL,
            violation_ring=poisoned(64, 8, device="cuda"),
            violation_write_index=int32([0], "cuda"),
            slot_run_counter=int64([0], "cuda"),
            kernel_run_counter=int64([0], "cuda"),
            real_kv_sources=(self.source,),
            real_kv_hash_mode=RealKvHashMode.ALL,
            enable_chain_position_assert=int32([1], "cuda"),
        )
        self.table = (torch.randperm(tokens, generator=generator, device="cuda") + 1).int()
        self.slots = self.table.long()
        self.table = torch.cat((torch.zeros(length, dtype=torch.int32, device="cuda"), self.table)).reshape(-1, length)
        self.ids = torch.randint(1 << 17, (tokens,), generator=generator, device="cuda")
        self.positions = torch.arange(length, device="cuda").repeat(bs)
        self.verify_plan = VerifyPlan.allocate(verify_capacity=tokens, device="cuda")
        self.write_plan = WritePlan.allocate(write_req_capacity=bs, device="cuda")
        self.rows = torch.arange(1, bs + 1, device="cuda")

    def plan(self, *, prefix: int, extend: int) -> None:
        launch_canary_plan_kernels(
            verify_plan_out=self.verify_plan,
            write_plan_out=self.write_plan,
            req_pool_indices=self.rows,
            prefix_lens=torch.full((self.bs,), prefix, device="cuda"),
            extend_seq_lens=torch.full((self.bs,), extend, device="cuda"),
            req_to_token=self.table,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=self.bs * self.length,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )

    def write(self) -> None:
        launch_canary_write_kernel(
            context=self.context,
            plan=self.write_plan,
            input_ids=self.ids,
            positions=self.positions,
            out_cache_loc=self.slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    def verify(self) -> None:
        launch_canary_verify_kernel(context=self.context, plan=self.verify_plan, check_verify_expected_token=True)

    def run(self) -> None:
        self.plan(prefix=0, extend=self.length)
        self.write()
        self.plan(prefix=self.length, extend=0)
        self.verify()


@pytest.mark.parametrize(("bs", "length"), [(1, 4096), (300, 17), (4096, 1)])
def test_a_written_step_verifies_and_one_flipped_bit_shows(bs: int, length: int) -> None:
    step = Step(bs=bs, length=length)
    step.run()
    assert step.context.violation_write_index.item() == 0
    assert step.context.slot_run_counter.item() == 2 * bs * length
    victim = int(step.slots[bs * length // 2])
    step.source.tensor[victim, 63] ^= 1
    step.verify()
    assert step.context.violation_write_index.item() == 1
    assert step.context.violation_ring[0, [1, 7]].tolist() == [victim, 4]


def test_a_captured_graph_replays() -> None:
    step = Step(bs=5, length=33)
    step.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for _ in range(3):
        graph.replay()
    assert step.context.kernel_run_counter.item() == 2 * (1 + 3)
    assert step.context.violation_write_index.item() == 0
    step.context.canary_buf[int(step.slots[7]), 0] ^= 1
    step.verify()
    assert step.context.violation_write_index.item() > 0


def test_concurrent_rows_each_get_a_place_and_the_counter_stops() -> None:
    step = Step(bs=300, length=17)
    step.run()
    step.source.tensor[:, 0] ^= 1
    step.verify()
    failing = 300 * 17
    assert step.context.violation_write_index.item() == failing
    rows = step.context.violation_ring[:, 1].tolist()
    assert len(set(rows)) == 64
    step.context.violation_write_index.fill_((1 << 30) - 100)
    for _ in range(3):
        step.verify()
    assert step.context.violation_write_index.item() == 1 << 30


def test_sizes_do_not_compile_again() -> None:
    import triton

    Step(bs=3, length=7).run()
    compiled: list[str] = []
    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event["fn"].name)
    try:
        for bs, length in ((1, 1), (1, 16), (16, 1), (16, 16), (5, 33)):
            Step(bs=bs, length=length, source_bytes=16 * length).run()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous
    assert compiled == []

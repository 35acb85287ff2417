"""Every kernel of the contract compiles for the GPUs that it must run on, without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.compile import CAPABILITIES, KernelSpec, compile_kernels

_SOURCES = {f"rows_{number}": "*u8" for number in range(4)}
_SINKS = {"ring": "*i64", "ring_index": "*i32", "slot_counter": "*i64", "kernel_counter": "*i64"}


def _int64(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "*i64")


def _specs(*, richest: bool) -> list[KernelSpec]:
    """All kernels with everything switched on, or with everything off and records that are not aligned."""
    device = "canary_kernels.device"
    sources = 4 if richest else 0
    alignment = 16 if richest else 1
    return [
        KernelSpec(
            module=f"{device}.plan",
            kernel="plan_offsets_kernel",
            pointers={
                **_int64("pool_indices", "prefix_lens", "extend_lens", "lut", "out_verify_offsets"),
                **_int64("out_write_offsets", "out_seeds"),
                **dict.fromkeys(("table", "out_num_valid", "out_enable", "out_num_reqs"), "*i32"),
            },
            constants={"HAS_LUT": richest, "BLOCK": 1024},
            num_warps=8,
        ),
        KernelSpec(
            module=f"{device}.plan",
            kernel="plan_entries_kernel",
            pointers={
                **_int64("pool_indices", "prefix_lens", "lut", "offsets", "valid_lens"),
                **_int64("out_slots", "out_tokens", "out_positions", "out_prevs"),
                **dict.fromkeys(("table", "enable", "expected"), "*i32"),
            },
            constants={"HAS_LUT": richest, "HAS_EXPECTED": richest, "BLOCK": 256},
        ),
        KernelSpec(
            module=f"{device}.verify",
            kernel="canary_verify_kernel",
            pointers={
                **_SINKS,
                **_int64("slots", "prevs", "expected_tokens", "expected_positions", "folds"),
                "buffer": "*u8",
                "num_valid": "*i32",
                "enable": "*i32",
            },
            constants={"NUM_SOURCES": sources, "CHECK_TOKEN": richest, "ALIGNMENT": alignment, "BLOCK": 256},
        ),
        KernelSpec(
            module=f"{device}.real_kv",
            kernel="verify_fold_kernel",
            pointers={
                **_SOURCES,
                **_int64("slots", "folds"),
                "num_valid": "*i32",
                "enable": "*i32",
            },
            constants={"NUM_SOURCES": max(1, sources), "SLOTS": 32},
            num_warps=1,
        ),
        KernelSpec(
            module=f"{device}.write",
            kernel="write_prepare_kernel",
            pointers={
                **_int64("offsets", "seeds", "slots", "seed_hashes", "seed_positions"),
                **dict.fromkeys(("num_valid", "owners"), "*i32"),
                "buffer": "*u8",
            },
            constants={"ALIGNMENT": alignment, "BLOCK": 1024},
        ),
        KernelSpec(
            module=f"{device}.write",
            kernel="write_fold_kernel",
            pointers={**_SOURCES, **_int64("slots", "folds"), "owners": "*i32"},
            constants={"NUM_SOURCES": max(1, sources), "SLOTS": 32},
            num_warps=1,
        ),
        KernelSpec(
            module=f"{device}.write",
            kernel="write_chain_kernel",
            pointers={
                **_SINKS,
                **_int64("offsets", "seeds", "tokens", "positions", "slots", "expected_tokens", "expected_positions"),
                **_int64("seed_hashes", "seed_positions", "folds"),
                **dict.fromkeys(("num_valid", "chain_flag", "owners"), "*i32"),
                "buffer": "*u8",
            },
            constants={
                "HAS_EXPECTED": richest,
                "NUM_SOURCES": sources,
                "ALIGNMENT": alignment,
                "BLOCK": 128,
                "UNROLL": 4,
            },
            num_warps=1,
        ),
        KernelSpec(
            module=f"{device}.scatter",
            kernel="scatter_kernel",
            pointers={**_int64("flat_in", "offsets", "pool_indices"), "pool_out": "*i32"},
            constants={"BLOCK": 256},
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("richest", "capabilities"), [(True, CAPABILITIES), (False, (90,))])
def test_every_kernel_compiles(tmp_path: Path, richest: bool, capabilities: tuple[int, ...]) -> None:
    specs = _specs(richest=richest)
    compiled = compile_kernels(specs, cache=tmp_path, capabilities=capabilities)
    assert [(row.kernel, row.capability) for row in compiled] == [
        (spec.kernel, capability) for spec in specs for capability in capabilities
    ]
    assert all(row.cubin_bytes > 1000 for row in compiled)

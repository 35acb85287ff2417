"""The contract's pinned vectors, on every backend."""

from __future__ import annotations

import pytest
import torch
from canary_kernels import CanaryLaunchTag, FailReason, RealKvHashMode, RealKvSource, WritePlan
from canary_kernels.constants import ANCHOR, CHAIN_HEAD, mix, signed
from canary_kernels.reference.mixing import mix as mix_tensor
from canary_kernels.write import launch_canary_write_kernel

from tests.kernels.contract import oracle
from tests.kernels.contract.cases import Pool, int32, int64
from tests.kernels.contract.conftest import Target

FINALISER = {
    0x9E3779B97F4A7C15: 0xE220A8397B1DCDAF,
    1: 0x5692161D100B05E5,
    0xDEADBEEFCAFEBABE: 0x7AD6664F09FFE52C,
    (1 << 64) - 1: 0xB4D055FCF2CBBD7B,
    1 << 63: 0x25C26EA579CEA98A,
    ANCHOR: CHAIN_HEAD,
}
BYTES = bytes.fromhex("01020408102040808182848890A0C0FF")
REAL_HASH = 0x6041580849E6407D


@pytest.mark.parametrize("value", FINALISER)
def test_the_finaliser(value: int) -> None:
    expected = FINALISER[value]
    assert oracle.s(value) == mix(value) == expected
    assert mix_tensor(int64([signed(value)])).tolist() == [signed(expected)]


def write_one(target: Target, mode: RealKvHashMode, read_bytes: int) -> oracle.Record:
    """The record of slot 1, token 3 at position 5, with one source that holds BYTES and then zeros."""
    rows = torch.zeros(4 * 32 + 16, dtype=torch.uint8)
    rows = rows[-rows.data_ptr() % 16 :][:128].reshape(4, 32)
    rows[1, :16] = torch.tensor(list(BYTES), dtype=torch.uint8)
    pool = Pool(buffer=[bytes(32)] * 4, stride=32, mode=mode, sources=[], source_args=[(rows, 1, 32, read_bytes)])
    context = pool.context(target.device, ring_rows=4, index=0, kind=CanaryLaunchTag.HEAD_K_FULL)
    launch_canary_write_kernel(
        context=context,
        plan=WritePlan(
            write_offsets=int64([0, 1], target.device),
            write_seed_slot_indices=int64([-1], target.device),
            write_num_valid_reqs=int32([1], target.device),
        ),
        input_ids=int64([3], target.device),
        positions=int64([5], target.device),
        out_cache_loc=int64([1], target.device),
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
        backend=target.backend,
    )
    return oracle.record_at([bytes(row) for row in context.canary_buf.tolist()], 1)


@pytest.mark.parametrize(
    ("mode", "read_bytes", "real_hash"),
    [
        (RealKvHashMode.ALL, 16, REAL_HASH),
        (RealKvHashMode.PARTIAL, 32, REAL_HASH),
        (RealKvHashMode.NONE, 32, 0),
    ],
)
def test_a_head_and_its_real_kv_hash(target: Target, mode: RealKvHashMode, read_bytes: int, real_hash: int) -> None:
    assert write_one(target, mode, read_bytes) == (3, 5, signed(CHAIN_HEAD), signed(real_hash))


def test_all_reads_as_much_as_it_is_told(target: Target) -> None:
    assert write_one(target, RealKvHashMode.ALL, 32)[3] not in (0, signed(REAL_HASH))


def test_numbers_of_enums() -> None:
    assert [tag.name for tag in CanaryLaunchTag] == [
        f"{place}_{half}_{pool}" for pool in ("FULL", "SWA") for place in ("HEAD", "TAIL", "SWEEP") for half in "KV"
    ]
    assert [tag.value for tag in CanaryLaunchTag] == list(range(12))
    assert [mode.value for mode in RealKvHashMode] == [0, 1, 2]
    assert {reason.name: reason.value for reason in FailReason} == {
        "VERIFY_CHAIN_HASH_MISMATCH": 1,
        "VERIFY_POSITION_MISMATCH": 2,
        "VERIFY_REAL_KV_HASH_MISMATCH": 4,
        "WRITE_TOKEN_MISMATCH": 8,
        "WRITE_POSITION_MISMATCH": 16,
        "VERIFY_TOKEN_MISMATCH": 32,
        "SLOT_OUT_OF_RANGE": 64,
    }
    assert RealKvSource.__dataclass_params__.frozen  # type: ignore[attr-defined]

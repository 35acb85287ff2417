"""Legal arguments of every launcher, and per check one change with its text, in the contract's order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from canary_kernels import (
    CanaryLaunchTag,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
)

from tests.kernels.contract.cases import int32, int64, poisoned

Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """`change` replaces arguments (dotted names reach into containers) and must raise `text`.

    `launch` is False for what only the validator's explicit scalars can express.
    """

    change: dict[str, Any]
    text: str
    argument: str
    check: str
    launch: bool = True


def changed(arguments: Arguments, change: dict[str, Any]) -> Arguments:
    """`arguments` with the changes, which may be values or functions of the old value."""
    out = dict(arguments)
    for path, value in change.items():
        name, _, field = path.partition(".")
        old = getattr(out[name], field) if field else out[name]
        new = value(old) if callable(value) else value
        out[name] = replace(out[name], **{field: new}) if field else new
    return out


def gap(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype, not contiguous."""
    wide = poisoned(*(2 * max(size, 2) for size in tensor.shape), dtype=tensor.dtype)
    view = wide[tuple(slice(0, 2 * size, 2) for size in tensor.shape)]
    if view.is_contiguous():  # of one element: torch calls any stride contiguous, so take two
        view = wide[tuple(slice(0, 4, 2) for _ in tensor.shape)]
    return view


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat((tensor, tensor[:1]))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def column(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, 1)


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _contiguous(path: str, text_name: str, argument: str) -> Refusal:
    return Refusal(change={path: gap}, text=f"{text_name} must be contiguous", argument=argument, check="contiguous")


def _dtype(path: str, text_name: str, argument: str, dtype: str) -> Refusal:
    return Refusal(
        change={path: other_dtype},
        text=f"{text_name} must have dtype torch.{dtype}, got torch.float64",
        argument=argument,
        check="dtype",
    )


def _device(path: str, text_name: str, argument: str, reference: str) -> Refusal:
    return Refusal(
        change={path: elsewhere},
        text=f"{text_name} must be on {reference}'s device cpu, got meta",
        argument=argument,
        check="device",
    )


# --- plan_offsets ---------------------------------------------------------------------------------------------------

OFFSETS_TENSORS = {
    "req_pool_indices": "int64",
    "prefix_lens": "int64",
    "extend_seq_lens": "int64",
    "req_to_token": "int32",
    "lut_tensor": "int64",
    "out_verify_offsets_scratch": "int64",
    "out_write_offsets": "int64",
    "out_write_seed_slot_indices": "int64",
    "out_verify_num_valid": "int32",
    "out_verify_enable": "int32",
    "out_write_num_valid_reqs": "int32",
}


def offsets_tensors() -> Arguments:
    one = {"dtype": torch.int32}
    return {
        "req_pool_indices": int64([1, 2, 0]),
        "prefix_lens": int64([2, 3, 0]),
        "extend_seq_lens": int64([1, 1, 0]),
        "req_to_token": torch.arange(32, dtype=torch.int32).reshape(4, 8),
        "lut_tensor": torch.arange(40),
        "out_verify_offsets_scratch": poisoned(4097),
        "out_write_offsets": poisoned(6),
        "out_write_seed_slot_indices": poisoned(5),
        "out_verify_num_valid": poisoned(1, **one),
        "out_verify_enable": poisoned(1, **one),
        "out_write_num_valid_reqs": poisoned(1, **one),
    }


def offsets_validator_arguments() -> Arguments:
    return {
        **offsets_tensors(),
        "bs": 3,
        "req_to_token_stride0": 8,
        "lut_len": 40,
        "has_swa_lut": True,
        "write_offsets_len": 6,
        "write_req_capacity": 5,
        "verify_capacity": 9,
    }


def offsets_launch_arguments(validator: Arguments) -> Arguments:
    launch = {name: validator[name] for name in OFFSETS_TENSORS if name != "lut_tensor"}
    launch["full_to_swa_index_mapping"] = validator["lut_tensor"]
    return {**launch, "swa_window_size": 2, "verify_capacity": validator["verify_capacity"]}


def _scalar(change: dict[str, Any], text: str, argument: str, check: str, *, launch: bool = False) -> Refusal:
    return Refusal(change=change, text=text, argument=argument, check=check, launch=launch)


def _length(name: str, text: str) -> Refusal:
    return Refusal(change={name: longer}, text=text, argument=name, check="length")


OFFSETS = [
    *(_contiguous(name, name, name) for name in OFFSETS_TENSORS),
    *(_dtype(name, name, name, dtype) for name, dtype in OFFSETS_TENSORS.items()),
    _scalar({"bs": 4097}, "offsets kernel bs must be in [0, 4096], got 4097", "bs", "range"),
    _scalar({"bs": -1}, "offsets kernel bs must be in [0, 4096], got -1", "bs", "range"),
    _scalar({"write_offsets_len": 0}, "write_offsets_len must be positive, got 0", "write_offsets_len", "range"),
    _scalar(
        {"write_req_capacity": -1}, "write_req_capacity must be non-negative, got -1", "write_req_capacity", "range"
    ),
    _scalar(
        {"verify_capacity": -1},
        "verify_capacity must be non-negative, got -1",
        "verify_capacity",
        "range",
        launch=True,
    ),
    _scalar(
        {"req_to_token_stride0": 0}, "req_to_token_stride0 must be positive, got 0", "req_to_token_stride0", "range"
    ),
    _scalar({"lut_len": -1}, "lut_len must be non-negative, got -1", "lut_len", "range"),
    _scalar({"has_swa_lut": 1}, "has_swa_lut must be bool, got int", "has_swa_lut", "type"),
    _scalar({"lut_len": 0}, "lut_len must be positive when has_swa_lut is True", "lut_len", "consistency"),
    _scalar({"has_swa_lut": False}, "lut_len must be 0 when has_swa_lut is False", "lut_len", "consistency"),
    _scalar({"req_pool_indices": longer}, "req_pool_indices length must be 3, got 4", "req_pool_indices", "length"),
    _scalar(
        {"req_pool_indices": column}, "req_pool_indices must be 1-D, got shape (3, 1)", "req_pool_indices", "shape"
    ),
    _length("prefix_lens", "prefix_lens length must be 3, got 4"),
    _length("extend_seq_lens", "extend_seq_lens length must be 3, got 4"),
    Refusal(
        change={"req_to_token": flat},
        text="req_to_token must be 2-D, got shape (32,)",
        argument="req_to_token",
        check="shape",
    ),
    _scalar({"lut_len": 41}, "lut_tensor length must be >= 41, got 40", "lut_tensor", "length"),
    Refusal(
        change={"lut_tensor": column},
        text="lut_tensor must be 1-D, got shape (40, 1)",
        argument="lut_tensor",
        check="shape",
    ),
    Refusal(
        change={"out_verify_offsets_scratch": lambda old: old[:4096]},
        text="out_verify_offsets_scratch length must be >= 4097, got 4096",
        argument="out_verify_offsets_scratch",
        check="length",
    ),
    _scalar({"out_write_offsets": longer}, "out_write_offsets length must be 6, got 7", "out_write_offsets", "length"),
    _scalar(
        {"out_write_seed_slot_indices": longer},
        "out_write_seed_slot_indices length must be 5, got 6",
        "out_write_seed_slot_indices",
        "length",
    ),
    _length("out_verify_num_valid", "out_verify_num_valid length must be 1, got 2"),
    _length("out_verify_enable", "out_verify_enable length must be 1, got 2"),
    _length("out_write_num_valid_reqs", "out_write_num_valid_reqs length must be 1, got 2"),
    _scalar(
        {"out_write_offsets": longer, "write_offsets_len": 7},
        "write_offsets_len must equal write_req_capacity + 1, got 7 and 5",
        "write_offsets_len",
        "length",
        launch=True,
    ),
    _scalar(
        {
            "out_write_offsets": lambda old: old[:3],
            "write_offsets_len": 3,
            "out_write_seed_slot_indices": lambda old: old[:2],
            "write_req_capacity": 2,
        },
        "bs=3 exceeds write_req_capacity=2",
        "bs",
        "range",
        launch=True,
    ),
    _scalar(
        {"req_to_token_stride0": 9},
        "req_to_token_stride0=9 does not match req_to_token.stride(0)=8",
        "req_to_token_stride0",
        "consistency",
    ),
    *(
        _device(name, name, name, "out_verify_offsets_scratch")
        for name in OFFSETS_TENSORS
        if name != "out_verify_offsets_scratch"
    ),
]

# --- plan_entries ---------------------------------------------------------------------------------------------------

ENTRIES_TENSORS = {
    "req_pool_indices": "int64",
    "prefix_lens": "int64",
    "req_to_token": "int32",
    "full_to_swa_index_mapping": "int64",
    "verify_offsets_scratch": "int64",
    "verify_enable": "int32",
    "req_to_verify_expected_tokens": "int32",
    "req_to_verify_expected_tokens_valid_lens": "int64",
    "out_verify_slot_indices": "int64",
    "out_verify_expected_tokens": "int64",
    "out_verify_expected_positions": "int64",
    "out_verify_prev_slot_indices": "int64",
}


def entries_arguments() -> Arguments:
    return {
        "req_pool_indices": int64([1, 2, 0]),
        "prefix_lens": int64([2, 3, 0]),
        "req_to_token": torch.arange(32, dtype=torch.int32).reshape(4, 8),
        "full_to_swa_index_mapping": torch.arange(40),
        "verify_offsets_scratch": int64([0, 2, 5, 5]),
        "verify_enable": int32([1]),
        "req_to_verify_expected_tokens": torch.arange(32, dtype=torch.int32).reshape(4, 8),
        "req_to_verify_expected_tokens_valid_lens": int64([8, 8, 8]),
        "out_verify_slot_indices": poisoned(9),
        "out_verify_expected_tokens": poisoned(9),
        "out_verify_expected_positions": poisoned(9),
        "out_verify_prev_slot_indices": poisoned(9),
        "kv_token_id_vs_position_offset": 0,
        "swa_window_size": 0,
    }


def _rank(name: str, change: Callable[[torch.Tensor], torch.Tensor], text: str, argument: str = "") -> Refusal:
    return Refusal(change={name: change}, text=text, argument=argument or name, check="shape")


ENTRIES = [
    Refusal(
        change={"req_to_verify_expected_tokens_valid_lens": None},
        text="launch_plan_entries_kernel requires req_to_verify_expected_tokens_valid_lens when "
        "req_to_verify_expected_tokens is set",
        argument="req_to_verify_expected_tokens_valid_lens",
        check="required",
    ),
    *(_dtype(name, name, name, dtype) for name, dtype in ENTRIES_TENSORS.items()),
    _rank("req_pool_indices", column, "req_pool_indices must be 1-D, got shape (3, 1)"),
    _length("prefix_lens", "prefix_lens length must be 3, got 4"),
    _rank("req_to_token", flat, "req_to_token must be 2-D, got shape (32,)"),
    _rank("full_to_swa_index_mapping", column, "full_to_swa_index_mapping must be 1-D, got shape (40, 1)"),
    _rank("verify_offsets_scratch", column, "verify_offsets_scratch must be 1-D, got shape (4, 1)"),
    _length("verify_enable", "verify_enable length must be 1, got 2"),
    _rank("req_to_verify_expected_tokens", flat, "req_to_verify_expected_tokens must be 2-D, got shape (32,)"),
    _length(
        "req_to_verify_expected_tokens_valid_lens",
        "req_to_verify_expected_tokens_valid_lens length must be 3, got 4",
    ),
    _rank("out_verify_slot_indices", column, "out_verify_slot_indices must be 1-D, got shape (9, 1)"),
    _length("out_verify_expected_tokens", "out_verify_expected_tokens length must be 9, got 10"),
    _length("out_verify_expected_positions", "out_verify_expected_positions length must be 9, got 10"),
    _length("out_verify_prev_slot_indices", "out_verify_prev_slot_indices length must be 9, got 10"),
    *(
        _device(name, name, name, "verify_offsets_scratch")
        for name in ENTRIES_TENSORS
        if name != "verify_offsets_scratch"
    ),
    Refusal(
        change={"verify_offsets_scratch": lambda old: old[:3]},
        text="verify_offsets_scratch length must be >= bs_padded + 1",
        argument="verify_offsets_scratch",
        check="length",
    ),
]

# --- plan -----------------------------------------------------------------------------------------------------------


def plan_arguments() -> Arguments:
    offsets, entries = offsets_tensors(), entries_arguments()
    return {
        "verify_plan_out": VerifyPlan(
            verify_slot_indices=entries["out_verify_slot_indices"],
            verify_expected_tokens=entries["out_verify_expected_tokens"],
            verify_expected_positions=entries["out_verify_expected_positions"],
            verify_prev_slot_indices=entries["out_verify_prev_slot_indices"],
            verify_num_valid=offsets["out_verify_num_valid"],
            enable=offsets["out_verify_enable"],
        ),
        "write_plan_out": WritePlan(
            write_offsets=offsets["out_write_offsets"],
            write_seed_slot_indices=offsets["out_write_seed_slot_indices"],
            write_num_valid_reqs=offsets["out_write_num_valid_reqs"],
        ),
        "req_pool_indices": offsets["req_pool_indices"],
        "prefix_lens": offsets["prefix_lens"],
        "extend_seq_lens": offsets["extend_seq_lens"],
        "req_to_token": offsets["req_to_token"],
        "swa_window_size": 2,
        "full_to_swa_index_mapping": offsets["lut_tensor"],
        "verify_capacity": 9,
        "req_to_verify_expected_tokens": entries["req_to_verify_expected_tokens"],
        "req_to_verify_expected_tokens_valid_lens": entries["req_to_verify_expected_tokens_valid_lens"],
        "kv_token_id_vs_position_offset": 0,
    }


@dataclass(frozen=True, kw_only=True)
class PlanRefusal(Refusal):
    """Which of the three labels the plan launcher's refusal carries."""

    kernel: str


PLAN = [
    PlanRefusal(
        kernel="plan",
        change={"full_to_swa_index_mapping": None},
        text="launch_canary_plan_kernels requires full_to_swa_index_mapping when swa_window_size > 0",
        argument="full_to_swa_index_mapping",
        check="required",
    ),
    PlanRefusal(
        kernel="plan",
        change={"req_pool_indices": torch.zeros(4097, dtype=torch.int64)},
        text="launch_canary_plan_kernels supports at most bs=4096 reqs per launch, got bs=4097. "
        "Bump _PLAN_BS_BLOCK_SIZE if real workloads need this.",
        argument="bs",
        check="range",
    ),
    PlanRefusal(
        kernel="plan",
        change={"verify_capacity": 8},
        text="launch_canary_plan_kernels verify_capacity=8 does not match "
        "verify_plan_out.verify_slot_indices.shape[0]=9",
        argument="verify_capacity",
        check="consistency",
    ),
    PlanRefusal(
        kernel="plan_offsets",
        change={"prefix_lens": gap},
        text="prefix_lens must be contiguous",
        argument="prefix_lens",
        check="contiguous",
    ),
    PlanRefusal(
        kernel="plan_offsets",
        change={"write_plan_out.write_offsets": longer},
        text="write_offsets_len must equal write_req_capacity + 1, got 7 and 5",
        argument="write_offsets_len",
        check="length",
    ),
    PlanRefusal(
        kernel="plan_entries",
        change={"req_to_verify_expected_tokens_valid_lens": None},
        text="launch_plan_entries_kernel requires req_to_verify_expected_tokens_valid_lens when "
        "req_to_verify_expected_tokens is set",
        argument="req_to_verify_expected_tokens_valid_lens",
        check="required",
    ),
    PlanRefusal(
        kernel="plan_entries",
        change={"verify_plan_out.verify_prev_slot_indices": longer},
        text="out_verify_prev_slot_indices length must be 9, got 10",
        argument="out_verify_prev_slot_indices",
        check="length",
    ),
]

# --- verify and write -----------------------------------------------------------------------------------------------


def aligned_source(dtype: torch.dtype = torch.uint8) -> RealKvSource:
    memory = torch.zeros(4 * 64 + 16, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    rows = memory[start : start + 256].reshape(4, 64).view(dtype)
    return RealKvSource(tensor=rows, page_size=2, num_bytes_per_token=32, read_bytes=16)


def context_of(sources: tuple[RealKvSource, ...]) -> VerifyOrWriteContext:
    return VerifyOrWriteContext(
        canary_buf=poisoned(8, 40, dtype=torch.uint8),
        kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
        violation_ring=poisoned(5, 8),
        violation_write_index=int32([0]),
        slot_run_counter=int64([0]),
        kernel_run_counter=int64([0]),
        real_kv_sources=sources,
        real_kv_hash_mode=RealKvHashMode.ALL,
        enable_chain_position_assert=int32([1]),
    )


def _source_view(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[tuple[RealKvSource, ...]], tuple[RealKvSource, ...]]:
    """Replace the second source's tensor behind its checks."""

    def apply(sources: tuple[RealKvSource, ...]) -> tuple[RealKvSource, ...]:
        broken = replace(sources[1])
        object.__setattr__(broken, "tensor", change(sources[1].tensor))
        return (sources[0], broken)

    return apply


def _every_second_byte(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(4, 128, dtype=torch.uint8)[:, ::2]


_COUNT = Refusal(
    change={"context.real_kv_sources": lambda sources: sources * 3},
    text="at most 4 RealKvSource entries supported by the CUDA ABI, got 6",
    argument="real_kv_sources",
    check="count",
)
_SOURCES_PACKED = [
    Refusal(
        change={"context.real_kv_sources": _source_view(_every_second_byte)},
        text="real_kv_sources[1].tensor rows must be packed (stride(-1) == 1), got strides (128, 2)",
        argument="real_kv_sources",
        check="stride",
    ),
    Refusal(
        change={"context.real_kv_sources": _source_view(lambda tensor: tensor.reshape(4, 2, -1))},
        text="real_kv_sources[1].tensor (viewed as uint8) must be 2-D, got 3-D",
        argument="real_kv_sources",
        check="shape",
    ),
]
_SOURCES_ELSEWHERE = Refusal(
    change={"context.real_kv_sources": _source_view(elsewhere)},
    text="real_kv_sources[1].tensor must be on canary_buf's device cpu, got meta",
    argument="real_kv_sources",
    check="device",
)
_SINKS = {
    "context.violation_write_index": "int32",
    "context.violation_ring": "int64",
    "context.slot_run_counter": "int64",
    "context.kernel_run_counter": "int64",
}
_SINK_SHAPES = [
    ("context.violation_write_index", longer, "violation_write_index length must be 1, got 2", "length"),
    ("context.violation_ring", flat, "violation_ring must be 2-D, got shape (40,)", "shape"),
    ("context.violation_ring", lambda old: old[:, :7].clone(), "violation_ring row length must be 8, got 7", "length"),
    ("context.slot_run_counter", longer, "slot_run_counter length must be 1, got 2", "length"),
    ("context.kernel_run_counter", longer, "kernel_run_counter length must be 1, got 2", "length"),
]


def _text_name(path: str) -> str:
    return path.removeprefix("context.")


def _label(path: str) -> str:
    return path.rpartition(".")[2]


def _all_contiguous(paths: list[str]) -> list[Refusal]:
    return [_contiguous(path, _text_name(path), _label(path)) for path in paths]


def _all_dtypes(paths: dict[str, str]) -> list[Refusal]:
    return [_dtype(path, _text_name(path), _label(path), dtype) for path, dtype in paths.items()]


def _all_devices(paths: dict[str, str]) -> list[Refusal]:
    return [
        _device(path, _text_name(path), _label(path), "canary_buf") for path in paths if path != "context.canary_buf"
    ]


def _shapes(rows: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str, str]]) -> list[Refusal]:
    return [
        Refusal(change={path: change}, text=text, argument=_label(path), check=check)
        for path, change, text, check in rows
    ]


def _stride(kernel: str) -> Refusal:
    return Refusal(
        change={"context.canary_buf": lambda old: old[:, :31].clone()},
        text=f"{kernel}: slot_stride_bytes must hold at least 32 bytes per slot, got 31",
        argument="slot_stride_bytes",
        check="range",
    )


def verify_arguments() -> Arguments:
    return {
        "context": context_of((aligned_source(), aligned_source(torch.bfloat16))),
        "plan": VerifyPlan(
            verify_slot_indices=int64([1, 2]),
            verify_expected_tokens=int64([1, 2]),
            verify_expected_positions=int64([1, 2]),
            verify_prev_slot_indices=int64([1, 2]),
            verify_num_valid=int32([2]),
            enable=int32([1]),
        ),
        "check_verify_expected_token": True,
    }


_VERIFY_TENSORS = {
    "context.canary_buf": "uint8",
    "plan.verify_slot_indices": "int64",
    "plan.verify_expected_tokens": "int64",
    "plan.verify_expected_positions": "int64",
    "plan.verify_prev_slot_indices": "int64",
    "plan.verify_num_valid": "int32",
    "plan.enable": "int32",
    **_SINKS,
}
_SINKS_CONTIGUOUS = [
    "context.violation_ring",
    "context.violation_write_index",
    "context.slot_run_counter",
    "context.kernel_run_counter",
]

VERIFY = [
    _COUNT,
    *_all_contiguous([path for path in _VERIFY_TENSORS if path not in _SINKS] + _SINKS_CONTIGUOUS),
    *_SOURCES_PACKED,
    *_all_dtypes(_VERIFY_TENSORS),
    *_shapes(
        [
            ("context.canary_buf", flat, "canary_buf must be 2-D, got shape (320,)", "shape"),
            (
                "plan.verify_slot_indices",
                column,
                "plan.verify_slot_indices must be 1-D, got shape (2, 1)",
                "shape",
            ),
            ("plan.verify_expected_tokens", longer, "plan.verify_expected_tokens length must be 2, got 3", "length"),
            (
                "plan.verify_expected_positions",
                longer,
                "plan.verify_expected_positions length must be 2, got 3",
                "length",
            ),
            (
                "plan.verify_prev_slot_indices",
                longer,
                "plan.verify_prev_slot_indices length must be 2, got 3",
                "length",
            ),
            ("plan.verify_num_valid", longer, "plan.verify_num_valid length must be 1, got 2", "length"),
            ("plan.enable", longer, "plan.enable length must be 1, got 2", "length"),
            *_SINK_SHAPES,
        ]
    ),
    *_all_devices(_VERIFY_TENSORS),
    _SOURCES_ELSEWHERE,
    _stride("canary_verify"),
]


def write_arguments(*, expected: bool = True) -> Arguments:
    return {
        "context": context_of((aligned_source(), aligned_source(torch.bfloat16))),
        "plan": WritePlan(
            write_offsets=int64([0, 1, 2, 2]),
            write_seed_slot_indices=int64([-1, 3, -1]),
            write_num_valid_reqs=int32([2]),
        ),
        "input_ids": int64([5, 6]),
        "positions": int64([0, 1]),
        "out_cache_loc": int64([1, 2]),
        "enable_write_input_assert": expected,
        "expected_input_tokens": int64([5, 6]) if expected else None,
        "expected_input_positions": int64([0, 1]) if expected else None,
    }


_STEP = {
    "plan.write_offsets": "int64",
    "plan.write_seed_slot_indices": "int64",
    "plan.write_num_valid_reqs": "int32",
    "input_ids": "int64",
    "positions": "int64",
    "out_cache_loc": "int64",
}
_EXPECTED = {"expected_input_tokens": "int64", "expected_input_positions": "int64"}
_WRITE_TENSORS = {
    "context.canary_buf": "uint8",
    **_STEP,
    **_EXPECTED,
    **_SINKS,
    "context.enable_chain_position_assert": "int32",
}

WRITE = [
    _COUNT,
    *_all_contiguous(["context.canary_buf", *_STEP]),
    *(
        Refusal(
            change={name: None},
            text="expected input tensors are required when enable_write_input_assert=True",
            argument=name,
            check="required",
        )
        for name in _EXPECTED
    ),
    Refusal(
        change={"enable_write_input_assert": False},
        text="expected input tensors must be None when enable_write_input_assert=False",
        argument="expected_input_tokens",
        check="forbidden",
    ),
    *_all_contiguous([*_EXPECTED, *_SINKS_CONTIGUOUS, "context.enable_chain_position_assert"]),
    *_SOURCES_PACKED,
    *_all_dtypes(_WRITE_TENSORS),
    *_shapes(
        [
            ("context.canary_buf", flat, "canary_buf must be 2-D, got shape (320,)", "shape"),
            ("plan.write_offsets", column, "plan.write_offsets must be 1-D, got shape (4, 1)", "shape"),
            (
                "plan.write_seed_slot_indices",
                column,
                "plan.write_seed_slot_indices must be 1-D, got shape (3, 1)",
                "shape",
            ),
            ("plan.write_num_valid_reqs", longer, "plan.write_num_valid_reqs length must be 1, got 2", "length"),
            ("input_ids", column, "input_ids must be 1-D, got shape (2, 1)", "shape"),
            ("positions", longer, "positions length must be 2, got 3", "length"),
            ("out_cache_loc", longer, "out_cache_loc length must be 2, got 3", "length"),
            ("expected_input_tokens", longer, "expected_input_tokens length must be 2, got 3", "length"),
            ("expected_input_positions", longer, "expected_input_positions length must be 2, got 3", "length"),
            *_SINK_SHAPES,
            (
                "context.enable_chain_position_assert",
                longer,
                "enable_chain_position_assert length must be 1, got 2",
                "length",
            ),
        ]
    ),
    *_all_devices(_WRITE_TENSORS),
    _SOURCES_ELSEWHERE,
    Refusal(
        change={"plan.write_offsets": longer},
        text="canary_write: write_offsets.size(0) must equal write_req_capacity + 1 (4), got 5",
        argument="write_offsets",
        check="length",
    ),
    _stride("canary_write"),
]

# --- scatter --------------------------------------------------------------------------------------------------------


def scatter_arguments() -> Arguments:
    return {
        "flat_in": int64([1, 2, 3]),
        "offsets": int64([0, 1, 3]),
        "req_pool_indices": int64([1, 0]),
        "pool_out": poisoned(3, 4, dtype=torch.int32),
    }


SCATTER = [
    *(
        Refusal(
            change={name: column},
            text=f"scatter_req_token_ids {name} must be 1-D, got shape {shape}",
            argument=name,
            check="shape",
        )
        for name, shape in (("flat_in", (3, 1)), ("offsets", (3, 1)), ("req_pool_indices", (2, 1)))
    ),
    Refusal(
        change={"pool_out": flat},
        text="scatter_req_token_ids pool_out must be 2-D, got shape (12,)",
        argument="pool_out",
        check="shape",
    ),
    *(
        Refusal(
            change={name: other_dtype},
            text=f"scatter_req_token_ids {name} must be {dtype}, got torch.float64",
            argument=name,
            check="dtype",
        )
        for name, dtype in (
            ("flat_in", "int64"),
            ("offsets", "int64"),
            ("req_pool_indices", "int64"),
            ("pool_out", "int32"),
        )
    ),
    Refusal(
        change={"offsets": longer},
        text="scatter_req_token_ids offsets length 4 != bs+1 (3)",
        argument="offsets",
        check="length",
    ),
    *(_device(name, name, name, "flat_in") for name in ("offsets", "req_pool_indices", "pool_out")),
]

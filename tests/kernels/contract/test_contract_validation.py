"""Every text of the contract, the order of the checks, their labels, and that a refused launch writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from canary_kernels import (
    KernelArgumentError,
    KernelArgumentTypeError,
    RealKvSource,
    VerifyPlan,
    WritePlan,
    launch_canary_plan_kernels,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
    launch_plan_entries_kernel,
    launch_plan_offsets_kernel,
    launch_scatter_req_token_ids_kernel,
    set_launch_observer,
    set_validation_observer,
    validate_plan_offsets,
    validate_real_kv_source,
)
from canary_kernels.launches import resolve_backend
from canary_kernels.validation import ARGUMENTS, CHECKS, KERNELS, argument_label

from tests.kernels.contract import validation_cases as cases
from tests.kernels.contract.cases import int64
from tests.kernels.contract.validation_cases import Arguments, PlanRefusal, Refusal, changed

BACKENDS = [None, "reference", "triton"]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif is_dataclass(value):
        for item in fields(value):
            yield from tensors_of(getattr(value, item.name))


def memory_of(arguments: Arguments) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors_of(arguments) if tensor.device.type != "meta"]


@pytest.fixture
def observed() -> Iterator[list[KernelArgumentError]]:
    seen: list[KernelArgumentError] = []
    set_validation_observer(seen.append)
    yield seen
    set_validation_observer(None)


def assert_refused(
    call: Callable[[], None], kernel: str, refusal: Refusal, observed: list[KernelArgumentError]
) -> KernelArgumentError:
    observed.clear()
    with pytest.raises(KernelArgumentError) as caught:
        call()
    error = caught.value
    assert str(error) == f"kv-canary: {refusal.text}"
    assert (error.kernel, error.argument, error.check) == (kernel, refusal.argument, refusal.check)
    assert isinstance(error, ValueError)
    assert observed == [error]
    return error


LAUNCHERS: list[tuple[str, Callable[..., None], Callable[[], Arguments], list[Any]]] = [
    ("plan", launch_canary_plan_kernels, cases.plan_arguments, cases.PLAN),
    ("plan_entries", launch_plan_entries_kernel, cases.entries_arguments, cases.ENTRIES),
    ("canary_verify", launch_canary_verify_kernel, cases.verify_arguments, cases.VERIFY),
    ("canary_write", launch_canary_write_kernel, cases.write_arguments, cases.WRITE),
    ("scatter", launch_scatter_req_token_ids_kernel, cases.scatter_arguments, cases.SCATTER),
]
REFUSALS = [
    pytest.param(kernel, launch, arguments, refusal, id=f"{kernel}-{number}-{refusal.argument}-{refusal.check}")
    for kernel, launch, arguments, refusals in LAUNCHERS
    for number, refusal in enumerate(refusals)
]


@pytest.mark.parametrize(("kernel", "launch", "arguments", "refusal"), REFUSALS)
def test_a_launcher_refuses_and_writes_nothing(
    kernel: str,
    launch: Callable[..., None],
    arguments: Callable[[], Arguments],
    refusal: Refusal,
    observed: list[KernelArgumentError],
) -> None:
    kernel = refusal.kernel if isinstance(refusal, PlanRefusal) else kernel
    for backend in BACKENDS:
        bad = changed(arguments(), refusal.change)
        before = memory_of(bad)
        assert_refused(lambda bad=bad, backend=backend: launch(**bad, backend=backend), kernel, refusal, observed)
        assert all(torch.equal(old, new) for old, new in zip(before, memory_of(bad), strict=True))


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher[0])
def test_earlier_checks_come_first(
    launcher: tuple[str, Callable[..., None], Callable[[], Arguments], list[Any]],
) -> None:
    _, launch, arguments, refusals = launcher
    assert_ordered(lambda change: launch(**changed(arguments(), change)), refusals)


def alternatives(first: Refusal, second: Refusal) -> bool:
    """Whether breaking both checks mends the first: expected inputs required or forbidden, a mapping and its length."""
    inputs = {first.check, second.check} == {"required", "forbidden"}
    mapping = {first.argument, second.argument} <= {"lut_len", "has_swa_lut"}
    return inputs or mapping


def assert_ordered(call: Callable[[dict[str, Any]], None], refusals: list[Refusal]) -> None:
    """Of any two broken checks of different arguments the earlier one speaks."""
    pairs = 0
    for number, first in enumerate(refusals):
        for second in refusals[number + 1 :]:
            if first.change.keys() & second.change.keys() or alternatives(first, second):
                continue
            with pytest.raises(KernelArgumentError) as caught:
                call({**second.change, **first.change})
            assert str(caught.value) == f"kv-canary: {first.text}", f"with {second.text}"
            pairs += 1
    assert pairs > len(refusals)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher[0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_legal_arguments_pass(
    launcher: tuple[str, Callable[..., None], Callable[[], Arguments], list[Any]], backend: str | None
) -> None:
    kernel, launch, arguments, _ = launcher
    launched: list[str] = []
    set_launch_observer(launched.append)
    try:
        launch(**arguments(), backend=backend)
    finally:
        set_launch_observer(None)
    assert launched == (["plan_offsets", "plan_entries"] if kernel == "plan" else [kernel])


@pytest.mark.parametrize("number", range(len(cases.OFFSETS)))
def test_the_offsets_launcher_and_its_validator(number: int, observed: list[KernelArgumentError]) -> None:
    refusal = cases.OFFSETS[number]
    bad = changed(cases.offsets_validator_arguments(), refusal.change)
    assert_refused(lambda: validate_plan_offsets(**bad), "plan_offsets", refusal, observed)
    if not refusal.launch:
        return
    launch = cases.offsets_launch_arguments(bad)
    before = memory_of(launch)
    for backend in BACKENDS:
        assert_refused(
            lambda backend=backend: launch_plan_offsets_kernel(**launch, backend=backend),
            "plan_offsets",
            refusal,
            observed,
        )
    assert all(torch.equal(old, new) for old, new in zip(before, memory_of(launch), strict=True))


def test_the_offsets_checks_are_ordered() -> None:
    # a wrong scalar makes later length checks speak of that scalar: those pairs are not about order
    scalars = {"bs", "lut_len", "write_offsets_len", "write_req_capacity", "req_to_token_stride0"}
    refusals = [
        refusal
        for refusal in cases.OFFSETS
        if not refusal.change.keys() & scalars or refusal.check in ("range", "consistency")
    ]
    assert_ordered(
        lambda change: validate_plan_offsets(**changed(cases.offsets_validator_arguments(), change)), refusals
    )


def test_scalar_tensors_are_refused_by_rank() -> None:
    scalar = torch.tensor(0)
    for launch, arguments, name in (
        (launch_plan_entries_kernel, cases.entries_arguments(), "req_pool_indices"),
        (launch_scatter_req_token_ids_kernel, cases.scatter_arguments(), "req_pool_indices"),
    ):
        with pytest.raises(KernelArgumentError, match=r"req_pool_indices must be 1-D, got shape \(\)"):
            launch(**{**arguments, name: scalar})
    offsets = cases.offsets_launch_arguments(cases.offsets_validator_arguments())
    offsets["req_to_token"] = torch.tensor(0, dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=r"req_to_token must be 2-D, got shape \(\)"):
        launch_plan_offsets_kernel(**offsets)


def test_a_mapping_without_a_window_is_legal_and_so_is_neither() -> None:
    launch_canary_plan_kernels(**{**cases.plan_arguments(), "swa_window_size": 0})
    launch_canary_plan_kernels(**{**cases.plan_arguments(), "swa_window_size": 0, "full_to_swa_index_mapping": None})


def test_expected_inputs_must_be_absent_when_they_are_not_compared(observed: list[KernelArgumentError]) -> None:
    refusal = Refusal(
        change={"expected_input_positions": int64([0, 1])},
        text="expected input tensors must be None when enable_write_input_assert=False",
        argument="expected_input_positions",
        check="forbidden",
    )
    bad = changed(cases.write_arguments(expected=False), refusal.change)
    assert_refused(lambda: launch_canary_write_kernel(**bad), "canary_write", refusal, observed)
    launch_canary_write_kernel(**cases.write_arguments(expected=False))


def test_scatter_dtypes_are_type_errors_too(observed: list[KernelArgumentError]) -> None:
    kinds = []
    for refusal in cases.SCATTER:
        bad = changed(cases.scatter_arguments(), refusal.change)
        error = assert_refused(lambda bad=bad: launch_scatter_req_token_ids_kernel(**bad), "scatter", refusal, observed)
        kinds.append(
            (refusal.check == "dtype", isinstance(error, TypeError), isinstance(error, KernelArgumentTypeError))
        )
    assert set(kinds) == {(True, True, True), (False, False, False)}


# --- containers -----------------------------------------------------------------------------------------------------

SOURCE = {
    "page_size": 4,
    "num_bytes_per_token": 32,
    "read_bytes": 16,
    "shape": (3, 64),
    "strides": (72, 1),
    "element_size": 2,
    "dtype": torch.bfloat16,
    "address": 4096,
}
SOURCE_REFUSALS = [
    Refusal(
        change={"page_size": 0},
        text="RealKvSource.page_size must be >= 1, got 0",
        argument="page_size",
        check="range",
    ),
    Refusal(
        change={"num_bytes_per_token": 24},
        text="RealKvSource.num_bytes_per_token must be a positive multiple of 16, got 24",
        argument="num_bytes_per_token",
        check="range",
    ),
    Refusal(
        change={"read_bytes": 48},
        text="RealKvSource.read_bytes must be a positive multiple of 16 in (0, num_bytes_per_token=32], got 48",
        argument="read_bytes",
        check="range",
    ),
    Refusal(
        change={"shape": (192,), "strides": (1,)},
        text="RealKvSource.tensor must be at least 2-D, got shape (192,)",
        argument="tensor",
        check="shape",
    ),
    Refusal(
        change={"strides": (68, 1)},
        text="RealKvSource.tensor row stride must be a multiple of 16 bytes, got 136 bytes "
        "(shape=(3, 64), strides=(68, 1), dtype=torch.bfloat16)",
        argument="tensor",
        check="stride",
    ),
    Refusal(
        change={"shape": (3, 56)},
        text="RealKvSource.tensor row is 112 bytes wide but page_size=4 x num_bytes_per_token=32 needs 128 "
        "(shape=(3, 56), dtype=torch.bfloat16)",
        argument="tensor",
        check="length",
    ),
    Refusal(
        change={"address": 4104},
        text="RealKvSource.tensor base address must be 16-byte aligned, got 4104",
        argument="tensor",
        check="alignment",
    ),
]


def test_a_legal_source_passes() -> None:
    validate_real_kv_source(**SOURCE)


@pytest.mark.parametrize("refusal", SOURCE_REFUSALS, ids=lambda refusal: f"{refusal.argument}-{refusal.check}")
def test_a_source_is_refused(refusal: Refusal, observed: list[KernelArgumentError]) -> None:
    assert_refused(lambda: validate_real_kv_source(**{**SOURCE, **refusal.change}), "real_kv_source", refusal, observed)


def test_the_source_checks_are_ordered() -> None:
    ordered = [refusal for refusal in SOURCE_REFUSALS if refusal.check != "shape"]
    for number, first in enumerate(ordered):
        later = [second for second in ordered[number + 1 :] if not second.change.keys() & first.change.keys()]
        for second in later:
            with pytest.raises(KernelArgumentError) as caught:
                validate_real_kv_source(**{**SOURCE, **second.change, **first.change})
            # what follows is the broken shape of the other check
            assert str(caught.value).startswith(f"kv-canary: {first.text.partition('(shape')[0]}")


@pytest.mark.parametrize("read_bytes", [0, -16, 8, 33])
def test_read_bytes_out_of_its_range(read_bytes: int) -> None:
    with pytest.raises(KernelArgumentError, match=r"RealKvSource\.read_bytes must be"):
        validate_real_kv_source(**{**SOURCE, "read_bytes": read_bytes})


def test_a_source_checks_its_tensor() -> None:
    source = cases.aligned_source()
    with pytest.raises(KernelArgumentError, match="row is 64 bytes wide but page_size=3"):
        replace(source, page_size=3)
    odd = torch.zeros(4 * 64 + 32, dtype=torch.uint8)
    odd = odd[-odd.data_ptr() % 16 + 8 :][:256].reshape(4, 64)
    with pytest.raises(KernelArgumentError, match=f"must be 16-byte aligned, got {odd.data_ptr()}$"):
        RealKvSource(tensor=odd, page_size=2, num_bytes_per_token=32, read_bytes=16)


def test_plans_allocate_nothing_valid(observed: list[KernelArgumentError]) -> None:
    verify = VerifyPlan.allocate(verify_capacity=3, device="cpu")
    assert (verify.verify_num_valid.tolist(), verify.enable.tolist()) == ([0], [1])
    assert verify.verify_slot_indices.shape == verify.verify_prev_slot_indices.shape == (3,)
    write = WritePlan.allocate(write_req_capacity=3, device="cpu")
    assert (write.write_offsets.shape, write.write_seed_slot_indices.shape) == ((4,), (3,))
    assert_refused(
        lambda: VerifyPlan.allocate(verify_capacity=0, device="cpu"),
        "verify_plan",
        Refusal(
            change={},
            text="VerifyPlan verify_capacity must be positive, got 0",
            argument="verify_capacity",
            check="range",
        ),
        observed,
    )
    assert_refused(
        lambda: WritePlan.allocate(write_req_capacity=-2, device="cpu"),
        "write_plan",
        Refusal(
            change={},
            text="WritePlan write_req_capacity must be positive, got -2",
            argument="write_req_capacity",
            check="range",
        ),
        observed,
    )


# --- labels and hooks -----------------------------------------------------------------------------------------------


def test_labels_come_from_closed_lists() -> None:
    error = KernelArgumentError("text", kernel="scatter", argument="offsets", check="length")
    assert str(error) == "kv-canary: text"
    for bad in ({"kernel": "x"}, {"argument": "x"}, {"check": "x"}):
        with pytest.raises(AssertionError, match="closed lists"):
            KernelArgumentError("text", **{"kernel": "scatter", "argument": "offsets", "check": "length", **bad})
    assert all(label.replace("_", "").islower() for label in KERNELS | CHECKS)
    assert all(label.replace("_", "").replace("0", "").islower() for label in ARGUMENTS)
    assert argument_label("plan.enable") == "enable"
    assert argument_label("real_kv_sources[3].tensor") == "real_kv_sources"


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher[0])
def test_an_unknown_backend_is_refused_before_anything_is_written(
    launcher: tuple[str, Callable[..., None], Callable[[], Arguments], list[Any]],
) -> None:
    name, launch, arguments, _ = launcher
    good = arguments()
    before = memory_of(good)
    with pytest.raises(KernelArgumentError, match="kv-canary: backend must be None") as caught:
        launch(**good, backend="cuda")
    assert (caught.value.kernel, caught.value.argument, caught.value.check) == (name, "backend", "range")
    assert all(torch.equal(old, new) for old, new in zip(before, memory_of(good), strict=True))


def test_the_default_backend_follows_the_tensor() -> None:
    assert resolve_backend("scatter", None, torch.zeros(1)) == "reference"
    assert resolve_backend("scatter", "triton", torch.zeros(1)) == "triton"

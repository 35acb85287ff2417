"""Which backends a contract test runs on, and the proof that a forced kernel really ran."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

_KERNELS = {
    "plan": ("plan_offsets_kernel", "plan_entries_kernel"),
    "verify": ("canary_verify_kernel",),
    "write": ("write_prepare_kernel", "write_fold_kernel", "write_chain_kernel"),
    "scatter": ("scatter_kernel",),
}


class _Counted:
    """A jit function that counts its launches."""

    def __init__(self, kernel: Any, name: str, launches: Counter[str]) -> None:
        self._kernel = kernel
        self._name = name
        self._launches = launches

    def __getitem__(self, grid: Any) -> Any:
        launch = self._kernel[grid]

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._launches[self._name] += 1
            return launch(*args, **kwargs)

        return counted


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where and how to launch: `launch(..., backend=target.backend)` on tensors of `target.device`."""

    device: str
    backend: str | None
    jit_launches: Counter[str] = field(default_factory=Counter)

    def assert_ran(self, *kernels: str) -> None:
        """The jit functions ran on a Triton target, and only there."""
        triton = self.backend == "triton" or (self.backend is None and self.device == "cuda")
        assert set(self.jit_launches) == (set(kernels) if triton else set())


@pytest.fixture(
    params=[
        ("cpu", None),
        ("cpu", "reference"),
        ("cpu", "triton"),
        pytest.param(("cuda", None), marks=pytest.mark.gpu),
        pytest.param(("cuda", "reference"), marks=pytest.mark.gpu),
    ],
    ids=lambda value: f"{value[0]}-{value[1] or 'default'}",
)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    device, backend = request.param
    target = Target(device=device, backend=backend)
    for module_name, kernels in _KERNELS.items():
        module = importlib.import_module(f"canary_kernels.device.{module_name}")
        for name in kernels:
            monkeypatch.setattr(module, name, _Counted(getattr(module, name), name, target.jit_launches))
    return target

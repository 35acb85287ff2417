"""Devices, backends, and the proof that a forced Triton kernel ran."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest
import torch

KERNELS = {
    "items": ("plan_items_kernel",),
    "digest": ("digest_kernel", "region_bytes_kernel"),
    "fold": ("fold_kernel", "fold_total_kernel"),
    "stamp": ("stamp_kernel", "stamp_walk_kernel"),
    "compare": ("compare_kernel",),
    "links": ("links_kernel",),
}


class _Recorder:
    def __init__(self, kernel: Any, name: str, ran: Counter[str]) -> None:
        self._kernel, self._name, self._ran = kernel, name, ran

    def __getitem__(self, grid: Any) -> Any:
        launch = self._kernel[grid]

        def run(*args: Any, **kwargs: Any) -> Any:
            self._ran[self._name] += 1
            return launch(*args, **kwargs)

        return run


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of jit functions by name."""
    counts: Counter[str] = Counter()
    for module_name, kernels in KERNELS.items():
        module = importlib.import_module(f"canary_kernels.device.{module_name}")
        for name in kernels:
            monkeypatch.setattr(module, name, _Recorder(getattr(module, name), name, counts))
    return counts


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["native", "sglang"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

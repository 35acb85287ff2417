"""Triton kernels run under the interpreter on host tensors, except where a GPU is asked for."""

from __future__ import annotations

import os

import pytest

if os.environ.get("CANARYD_TEST_GPU") != "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["native", "sglang"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    params=[
        ("cpu", "reference"),
        ("cpu", "triton"),
        pytest.param(("cuda", None), marks=pytest.mark.gpu),
    ],
    ids=lambda value: "-".join(str(part) for part in value),
)
def place(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    """(device, backend)."""
    return request.param


@pytest.fixture(params=["whole", "cut"])
def sizes(request: pytest.FixtureRequest, place: tuple[str, str | None]) -> dict[str, int]:
    """Arguments of `make_backend`: all items of a work in one chunk, or cut inside runs and pages."""
    if request.param == "whole":
        return {}
    return {"chunk_items": 37 if place == ("cpu", "triton") else 7}

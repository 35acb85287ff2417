"""The shared fixtures do what they say."""

from __future__ import annotations

import zlib

import torch


def _allocate_as(package: str, expression: str) -> torch.Tensor:
    """Evaluates `expression` as if a module of `package` did."""
    value = eval(expression, {"torch": torch, "__name__": f"{package}.module"})  # noqa: S307
    assert isinstance(value, torch.Tensor)
    return value


def test_our_packages_get_poisoned_memory() -> None:
    for expression in (
        "torch.empty(7, dtype=torch.int64)",
        "torch.empty_like(torch.zeros(3, 5, dtype=torch.uint8))",
        "torch.zeros(2).new_empty((4,), dtype=torch.int32)",
    ):
        for package in ("canaryd", "canary_kernels"):
            tensor = _allocate_as(package, expression)
            assert set(tensor.view(-1).view(torch.uint8).tolist()) == {0xA5}, expression


def test_other_packages_get_ordinary_memory() -> None:
    size = 40 << 20  # above the largest threshold of malloc for a mapping of its own: fresh pages are zero
    other = _allocate_as("transformers", f"torch.empty({size}, dtype=torch.uint8)")
    assert not (other == 0xA5).any()


def test_seed_is_the_same_for_the_same_test(seed: int) -> None:
    assert seed == zlib.crc32(b"tests/repository/test_poison.py::test_seed_is_the_same_for_the_same_test")

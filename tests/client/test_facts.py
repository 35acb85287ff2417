"""Columns from every kind of integers, copied at the call."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch

from canaryd.client import Final, column

VALUES = [0, 1, -1, 1 << 40, -(1 << 63), (1 << 63) - 1]
EXPECTED = np.array(VALUES, dtype="<i8").tobytes()
SMALL = [3, 0, 7]
SMALL_EXPECTED = np.array(SMALL, dtype="<i8").tobytes()


@pytest.mark.parametrize(
    "values",
    [
        VALUES,
        tuple(VALUES),
        iter(VALUES),
        np.array(VALUES),
        np.array([VALUES, VALUES])[1],
        np.array([[v, 9] for v in VALUES])[:, 0],
        torch.tensor(VALUES),
        torch.tensor([[v, 9] for v in VALUES])[:, 0],
        array.array("q", VALUES),
        memoryview(array.array("q", VALUES)),
        EXPECTED,
        bytearray(EXPECTED),
        memoryview(EXPECTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_int64(values: Any) -> None:
    assert column(values) == EXPECTED


@pytest.mark.parametrize(
    "values",
    [np.array(SMALL, dtype=kind) for kind in ("i1", "u2", "<i4", ">i8", "u8")]
    + [torch.tensor(SMALL, dtype=kind) for kind in (torch.int32, torch.uint8)]
    + [array.array("i", SMALL), memoryview(array.array("i", SMALL)), [np.int32(value) for value in SMALL]],
    ids=lambda value: type(value).__name__,
)
def test_other_integers_are_widened(values: Any) -> None:
    assert column(values) == SMALL_EXPECTED


@pytest.mark.parametrize("values", [[], b"", np.array([], dtype=np.int64), torch.tensor([], dtype=torch.int64)])
def test_empty(values: Any) -> None:
    assert column(values) == b""


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([1.5], TypeError),
        (np.array([1.0]), TypeError),
        (torch.tensor([1.0]), TypeError),
        (torch.zeros(1, dtype=torch.int64, device="meta"), (TypeError, NotImplementedError)),
        ("12345678", TypeError),
        ([None], TypeError),
        (7, TypeError),
        (np.array([object()]), TypeError),
        ([1 << 63], OverflowError),
        (np.array([1 << 63], dtype=np.uint64), OverflowError),
        (b"1234567", ValueError),
    ],
)
def test_what_is_not_integers(values: Any, error: Any) -> None:
    with pytest.raises(error):
        column(values)


def test_buffers_are_copied_at_the_call() -> None:
    slots = np.array([1, 2])
    final = Final()
    final.write(0, ["r"], [2], slots, slots, slots)
    slots[:] = 9
    assert final.writes[0].slots == column([1, 2])


@pytest.mark.parametrize(
    "tell",
    [
        lambda final: final.write(0, ["r"], [2], [0, 1], None, [3, 4]),
        lambda final: final.write(0, None, [2], [0, 1], [5, 6], [3, 4]),
        lambda final: final.open("r", 0, [1 << 70], 0),
        lambda final: final.remap("r", 0, 0, [1.5]),
        lambda final: final.void(0, b"1234567"),
        lambda final: final.copy(0, [1], "x"),
        lambda final: final.free(0, None),
    ],
)
def test_what_cannot_be_told_is_kept_and_not_raised(tell: Any) -> None:
    final = Final()
    tell(final)
    assert isinstance(final.problem, TypeError | ValueError | OverflowError)
    assert not any((final.writes, final.opened, final.remaps, final.voids, final.copies, final.freed))

"""Columns from every kind of integers, copied at the call."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from canaryd.client import Final, column
from canaryd.client.columns import keep, kept_bytes, unkept
from canaryd.client.facts import end_message

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
    if not isinstance(values, Iterator):
        assert column(values) == EXPECTED
    assert unkept(keep(values)) == EXPECTED


@pytest.mark.parametrize(
    "values",
    [np.array(SMALL, dtype=kind) for kind in ("i1", "u2", "<i4", ">i8", "u8")]
    + [torch.tensor(SMALL, dtype=kind) for kind in (torch.int32, torch.uint8)]
    + [array.array("i", SMALL), memoryview(array.array("i", SMALL)), [np.int32(value) for value in SMALL]],
    ids=lambda value: type(value).__name__,
)
def test_other_integers_are_widened(values: Any) -> None:
    assert column(values) == SMALL_EXPECTED
    assert unkept(keep(values)) == SMALL_EXPECTED


@pytest.mark.parametrize("values", [[], b"", np.array([], dtype=np.int64), torch.tensor([], dtype=torch.int64)])
def test_empty(values: Any) -> None:
    assert column(values) == b""
    assert unkept(keep(values)) == b""


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([1.5], TypeError),
        (np.array([1.0]), TypeError),
        (torch.tensor([1.0]), TypeError),
        (torch.tensor([1.0], dtype=torch.bfloat16), TypeError),
        (torch.tensor([True]), TypeError),
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
    with pytest.raises(error):
        unkept(keep(values))


BUFFERS: list[Callable[[], Any]] = [
    lambda: [1, 2],
    lambda: np.array([1, 2]),
    lambda: np.array([1, 2], dtype=np.int32),
    lambda: np.array([[1, 9], [2, 9]])[:, 0],
    lambda: torch.tensor([1, 2]),
    lambda: torch.tensor([1, 2], dtype=torch.int32),
    lambda: array.array("q", [1, 2]),
    lambda: memoryview(array.array("q", [1, 2])),
    lambda: bytearray(column([1, 2])),
]


@pytest.mark.parametrize("make", BUFFERS)
def test_buffers_are_copied_at_the_call(make: Callable[[], Any]) -> None:
    """The engine may write other numbers into its buffers as soon as the call returns."""
    rows = ["a", "b"]
    buffers = [make() for _ in range(9)]
    final = Final()
    final.write(0, rows, *buffers[:4])
    final.open("c", 0, buffers[4], 2, ids=buffers[5])
    final.remap("c", 0, 1, buffers[6])
    final.copy(0, buffers[7], buffers[8])
    final.void(0, buffers[8])
    final.free(0, buffers[8])
    rows[:] = ["x", "y"]
    for buffer in buffers:
        for at in range(len(buffer)):
            buffer[at] = 7
    end = end_message(1, "done", final.facts)
    (writes,), (row,), (remap,) = end.writes, end.opened, end.remaps
    (copies,), (void,), (freed,) = end.copies, end.voids, end.freed
    columns = [writes.counts, writes.positions, writes.tokens, writes.slots, row.pages, row.ids, remap.pages]
    columns += [copies.sources, copies.destinations, void.pages, freed.pages]
    assert writes.rows == ["a", "b"]
    assert columns == [column([1, 2])] * len(columns)


def test_rows_are_those_of_their_own_call() -> None:
    """Rows named like the last ones share a copy; the next names are not seen by messages that wait."""
    rows = [f"r{number}" for number in range(3)]
    final = Final()
    for _ in range(2):
        final.write(0, rows, [1, 1, 1], [0, 0, 0], [1, 2, 3], [4, 5, 6])
    rows[1] = "other"
    final.write(0, rows, [1, 1, 1], [0, 0, 0], [1, 2, 3], [4, 5, 6])
    final.write(0, tuple(rows), [1, 1, 1], [0, 0, 0], [1, 2, 3], [4, 5, 6])  # type: ignore[arg-type]
    named = [writes.rows for writes in end_message(1, "done", final.facts).writes]
    assert named == [["r0", "r1", "r2"], ["r0", "r1", "r2"], ["r0", "other", "r2"], ["r0", "other", "r2"]]


@pytest.mark.parametrize(
    ("values", "size"),
    [([1] * 10, 400), (bytes(80), 80), (np.arange(10), 80), (np.arange(10, dtype=np.int32), 40), (range(10), 80)],
)
def test_size_of_what_is_kept(values: Any, size: int) -> None:
    assert kept_bytes(keep(values)) == size
    final = Final()
    final.write(0, ["r"], [10], values, values, values)
    final.free(0, values)
    assert final.size > 4 * size


@pytest.mark.parametrize(
    "tell",
    [
        lambda final: final.write(0, ["r"], [2], [0, 1], None, [3, 4]),
        lambda final: final.write(0, None, [2], [0, 1], [5, 6], [3, 4]),
        lambda final: final.remap("r", 0, 0, "x"),
        lambda final: final.void(0, torch.zeros(1, device="meta")),
        lambda final: final.copy(0, [1], "x"),
        lambda final: final.free(0, None),
    ],
)
def test_what_cannot_be_kept_is_a_problem_and_not_raised(tell: Any) -> None:
    final = Final()
    tell(final)
    assert final.problem is not None
    assert final.facts == []
    first = final.problem
    final.open("r", 0, None, 0)  # type: ignore[arg-type]
    assert final.problem is first


@pytest.mark.parametrize(
    ("tell", "error"),
    [
        (lambda final: final.open("r", 0, [1 << 70], 0), OverflowError),
        (lambda final: final.remap("r", 0, 0, [1.5]), TypeError),
        (lambda final: final.write(0, ["r"], [2], [0, 1], [5, None], [3, 4]), TypeError),
        (lambda final: final.write(0, ["r"], np.ones(1), [0], [5], [3]), TypeError),
        (lambda final: final.free(0, np.array([1 << 63], dtype=np.uint64)), OverflowError),
        (lambda final: final.void(0, b"1234567"), ValueError),
    ],
)
def test_what_is_not_integers_shows_when_the_message_is_made(tell: Any, error: type[Exception]) -> None:
    final = Final()
    tell(final)
    assert final.problem is None
    with pytest.raises(error):
        end_message(1, "done", final.facts)

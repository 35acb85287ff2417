"""A kernel that differs from its reference is red, and then no time is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import check
from benchmarks.gpu.workload import Goal, Place, Row


class Counting:
    """Set number `number` writes 1 to n; on Triton, in set `wrong`, one value differs."""

    sets = 2
    bytes_moved = 8

    def __init__(self, place: Place, size: int, wrong: int | None) -> None:
        self._out = [place.poisoned(size) for _ in range(self.sets)]
        self._wrong = wrong

    def launch(self, number: int, backend: str) -> None:
        self._out[number].copy_(torch.arange(1, self._out[number].numel() + 1))
        if backend == "triton" and number == self._wrong:
            self._out[number][-1] ^= 1

    def results(self, number: int) -> list[torch.Tensor]:
        return [self._out[number]]


def counting(wrong: int | None) -> Row:
    return Row(name="counting", build=lambda place, size: Counting(place, size, wrong), size=9, goal=Goal(micros=1))


@pytest.fixture
def place() -> Place:
    return Place.of("cpu", 4096)


def test_equal_results_are_green(place: Place) -> None:
    assert list(check.mismatches(counting(None), place, 7)) == []


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_value_in_one_set_is_found(place: Place, wrong: int) -> None:
    (found,) = check.mismatches(counting(wrong), place, 7)
    assert (found.row, found.size, found.set_number, found.result) == ("counting", 7, wrong, 0)
    assert "1 of 7 values differ, the first at [6]: 6, not 7" in found.detail


def test_red_ends_with_1_and_times_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import benchmarks.gpu.__main__ as program

    def no_times(*_: Any, **__: Any) -> None:
        raise AssertionError("timed in spite of a red check")

    monkeypatch.setattr(program, "ROWS", (counting(1),))
    monkeypatch.setattr(program, "run", no_times)
    assert program.main(["--only", "counting", "--check"]) == 1
    assert "RED: no times are reported." in capsys.readouterr().out
    monkeypatch.setattr(program, "ROWS", (counting(None),))
    assert program.main(["--only", "counting", "--check"]) == 0


def test_relations_between_rows_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    import benchmarks.gpu.__main__ as program
    from tests.benchmarks.test_report import a_report

    rows = [
        Row(name=name, build=counting(None).build, size=1, goal=Goal(below=below))
        for name, below in (("a", "b"), ("b", None))
    ]
    for mine, other, met in ((3.0, 4.0, True), (4.0, 4.0, False)):
        results = [a_report(p50=value).rows[0] for value in (mine, other)]
        for row, result in zip(rows, results, strict=True):
            result.name, result.met = row.name, None
        program.judge_relations(rows, results)
        assert [result.met for result in results] == [met, None]

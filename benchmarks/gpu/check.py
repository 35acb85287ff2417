"""No time without proof: each row's work, small, against the torch reference, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.workload import Place, Row


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A result that is not the reference's."""

    row: str
    size: int
    set_number: int
    result: int
    detail: str


def mismatches(row: Row, place: Place, size: int) -> Iterator[Mismatch]:
    """Builds the row twice from one seed, runs it on the kernels and on the reference, and compares all it wrote."""
    kernels, reference = row.build(place, size), row.build(place, size)
    for number in range(kernels.sets):
        kernels.launch(number, "triton")
        reference.launch(number, "reference")
        pairs = zip(kernels.results(number), reference.results(number), strict=True)
        for result, (got, wanted) in enumerate(pairs):
            detail = _difference(got, wanted)
            if detail:
                yield Mismatch(row=row.name, size=size, set_number=number, result=result, detail=detail)


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    if got.shape != wanted.shape:
        return f"shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    differs = got != wanted
    count = int(differs.sum())
    if not count:
        return ""
    where = differs.nonzero()[0].tolist()
    place = tuple(where)
    return f"{count} of {got.numel()} values differ, the first at {where}: {got[place]}, not {wanted[place]}"

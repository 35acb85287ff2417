"""Whether strided regions share bytes: exact, from strides and counts, without listing slots.

A region is a set of equal intervals on a regular grid: `start + i*S1 + j*S2 + k*S3 + [0, width)`. Two grids with the
same outermost stride S overlap exactly if, for some difference d of their outer indices, the inner grids overlap when
one is moved by d*S; only the few d for which their bounding intervals meet are tried. Real layouts end after one or
two steps. Contorted ones may not: the work is bounded, and what cannot be proved within the bound is refused.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

WORK_LIMIT = 200_000
"""Most pairs of grids that are compared for one group, recursion included: about half a second."""


class TooIrregular(Exception):
    """The regions are so irregular that no proof was found within the bound of work."""


@dataclass(frozen=True, order=True)
class _Dim:
    stride: int
    count: int


@dataclass(frozen=True)
class Grid:
    """Equal intervals on a regular grid: `dims` by falling stride, every count above 1."""

    start: int
    width: int
    dims: tuple[_Dim, ...]

    @property
    def span(self) -> int:
        """Bytes from the first to the last byte."""
        return self.width + sum(dim.stride * (dim.count - 1) for dim in self.dims)

    def inner(self) -> Grid:
        """The grid at outermost index 0."""
        return Grid(self.start, self.width, self.dims[1:])


def grid(start: int, width: int, dims: Sequence[tuple[int, int]]) -> Grid:
    """The grid of `(stride, count)` dims in any order; dims that continue one another seamlessly become one."""
    kept = sorted((_Dim(stride, count) for stride, count in dims if count > 1), reverse=True)
    while kept and kept[-1].stride == width:
        width *= kept.pop().count
    merged: list[_Dim] = []
    for dim in kept:
        if merged and merged[-1].stride == dim.stride * dim.count:
            merged[-1] = _Dim(dim.stride, dim.count * merged[-1].count)
        else:
            merged.append(dim)
    return Grid(start, width, tuple(merged))


class OverlapProof:
    """Looks for overlaps with a bounded amount of work. Methods raise TooIrregular when it is used up."""

    def __init__(self, work_limit: int = WORK_LIMIT) -> None:
        self._work_left = work_limit

    def find(self, grids: Sequence[Grid]) -> tuple[int, int] | None:
        """Numbers of two grids that share a byte, the same number twice for one that overlaps itself, or None."""
        for number, single in enumerate(grids):
            if self.overlaps_itself(single):
                return number, number
        for first, second in self._candidates(grids):
            if self.share_bytes(grids[first], grids[second]):
                return first, second
        return None

    def overlaps_itself(self, single: Grid) -> bool:
        """Whether two different elements of the grid share a byte."""
        if any(dim.stride == 0 for dim in single.dims):
            return True
        for depth, dim in enumerate(single.dims):
            inner = Grid(0, single.width, single.dims[depth + 1 :])
            # elements whose outermost different index is this one, `apart` steps from each other
            apart_max = min(dim.count - 1, (inner.span - 1) // dim.stride)
            for apart in range(1, apart_max + 1):
                if self.share_bytes(inner, Grid(apart * dim.stride, inner.width, inner.dims)):
                    return True
        return False

    def share_bytes(self, a: Grid, b: Grid) -> bool:
        """Whether some byte belongs to both grids."""
        self._spend()
        if a.start >= b.start + b.span or b.start >= a.start + a.span:
            return False
        if not a.dims and not b.dims:
            return True
        if a.dims and b.dims and a.dims[0].stride == b.dims[0].stride:
            stride = a.dims[0].stride
            return self._meet(a.inner(), b.inner(), stride, 1 - b.dims[0].count, a.dims[0].count - 1)
        if not b.dims or (a.dims and a.dims[0].stride > b.dims[0].stride):
            return self._meet(a.inner(), b, a.dims[0].stride, 0, a.dims[0].count - 1)
        return self._meet(b.inner(), a, b.dims[0].stride, 0, b.dims[0].count - 1)

    def _meet(self, moving: Grid, fixed: Grid, stride: int, low: int, high: int) -> bool:
        """Whether `moving`, shifted by d*stride for some d from low to high, meets `fixed`."""
        # only shifts for which the bounding intervals meet: moving.start + d*stride in (fixed.start - span, fixed end)
        first = (fixed.start - moving.start - moving.span) // stride + 1
        last = -((moving.start - fixed.start - fixed.span) // stride) - 1
        for shift in range(max(low, first), min(high, last) + 1):
            if self.share_bytes(Grid(moving.start + shift * stride, moving.width, moving.dims), fixed):
                return True
        return False

    def _candidates(self, grids: Sequence[Grid]) -> Iterator[tuple[int, int]]:
        """Pairs that may overlap; a superset of those that do."""
        for members in _components(grids):
            yield from self._pairs_within(grids, members)

    def _pairs_within(self, grids: Sequence[Grid], members: list[int]) -> Iterator[tuple[int, int]]:
        strides = {grids[number].dims[0].stride if grids[number].dims else 0 for number in members}
        stride = strides.pop()
        if strides or stride == 0 or any(grids[number].inner().span > stride for number in members):
            arcs = [(grids[number].start, grids[number].start + grids[number].span, number) for number in members]
        else:
            # interleaved with one page stride: on a circle of that length only real neighbours meet
            arcs = []
            for number in members:
                start = grids[number].start % stride
                end = start + grids[number].inner().span
                arcs.append((start, min(end, stride), number))
                if end > stride:
                    arcs.append((0, end - stride, number))
        active: list[tuple[int, int]] = []
        for start, end, number in sorted(arcs):
            while active and active[0][0] <= start:
                heapq.heappop(active)
            for _, other in active:
                self._spend()
                if other != number:
                    yield other, number
            heapq.heappush(active, (end, number))

    def _spend(self) -> None:
        self._work_left -= 1
        if self._work_left < 0:
            raise TooIrregular


def _components(grids: Sequence[Grid]) -> Iterator[list[int]]:
    """Grids whose bounding intervals are connected."""
    members: list[int] = []
    reach = 0
    for number in sorted(range(len(grids)), key=lambda each: grids[each].start):
        if members and grids[number].start >= reach:
            yield members
            members = []
            reach = 0
        members.append(number)
        reach = max(reach, grids[number].start + grids[number].span)
    if members:
        yield members

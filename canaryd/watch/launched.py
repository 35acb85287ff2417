"""What a burst was launched with: needed to judge its results later."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from canaryd.watch.burst import I64, BurstResult, GroupResult
from canaryd.watch.columns import Mask
from canaryd.watch.copies import Pairs
from canaryd.watch.counters import VerifyMode
from canaryd.watch.links import LinkItems
from canaryd.watch.suspects import ContentSuspects, LinkSuspects

MODES = tuple(VerifyMode)
MODE_CODE = {mode: code for code, mode in enumerate(MODES)}


@dataclass(kw_only=True)
class StampPart:
    """Slots stamped, with their generations at launch, whether what their record held before is other content
    (`REPLACES`), and whether they are reserved and only scanned. [n] each."""

    slots: I64
    generations: I64
    replaces: Mask
    reserved: Mask

    @property
    def size(self) -> int:
        """Slots that are stamped to be guarded."""
        return int(np.count_nonzero(~self.reserved))


@dataclass(kw_only=True)
class ComparePart:
    """Slots compared, [n]: why (`MODES`), generations at launch, and which stretch is which batch's second read."""

    slots: I64
    generations: I64
    modes: npt.NDArray[np.uint8]
    batches: list[tuple[ContentSuspects, int, int]]


@dataclass(kw_only=True)
class LinkPart:
    """Links checked, and which stretch is which batch's second read."""

    items: LinkItems
    batches: list[tuple[LinkSuspects, int, int]]


@dataclass(kw_only=True)
class GroupPart:
    """One group's share."""

    group: int
    stamps: StampPart | None = None
    compare: ComparePart | None = None
    links: LinkPart | None = None
    copies: Pairs | None = None


@dataclass(kw_only=True)
class LaunchedBurst:
    """A burst from launch to judgement. `announced` and `result` are set when its device work is complete."""

    number: int
    launched_at: float
    parts: list[GroupPart]
    announced: int = 0
    read_at: float = 0.0
    result: BurstResult | None = None
    dropped: bool = field(default=False)

    def result_of(self, group: int) -> GroupResult | None:
        """The result of one group."""
        if self.result is None:
            return None
        return next((result for result in self.result.groups if result.group == group), None)

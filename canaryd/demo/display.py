"""What the demo shows while it runs and at its end: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from canaryd.demo.scoring import ClassTally, Score

_COLUMNS = ("class", "injected", "settled", "detected", "missed", "unguarded", "p50 s", "max s")
LEGEND = """\
injected: all faults; settled: those on slots whose stamp was final, which must all be detected; unguarded: the
others, and those that the engine overwrote or freed before they were read; p50 s, max s: seconds to detect."""
_LINE_SECONDS = 5.0


def _cells(name: str, tally: ClassTally) -> list[str]:
    document = tally.document()
    seconds = ["-" if document[key] is None else f"{document[key]:.2f}" for key in ("seconds_p50", "seconds_max")]
    counts = [tally.injected + tally.unguarded, tally.injected, tally.detected, tally.missed, tally.unguarded]
    return [name, *map(str, counts), *seconds]


def _total(tallies: dict[str, ClassTally]) -> ClassTally:
    total = ClassTally()
    for tally in tallies.values():
        total.injected += tally.injected
        total.detected += tally.detected
        total.missed += tally.missed
        total.unguarded += tally.unguarded
        total.seconds += tally.seconds
    return total


def table_lines(score: Score) -> list[str]:
    """The result as text, with what its columns mean."""
    tallies = score.tallies()
    rows = [list(_COLUMNS), *(_cells(name, tally) for name, tally in tallies.items())]
    rows.append(_cells("total", _total(tallies)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
        if number in (0, len(rows) - 2):
            lines.append("  ".join("-" * width for width in widths))
    lines += LEGEND.splitlines()
    lines.append(f"false alarms: {len(score.false_alarms)}")
    return lines


def eviction_lines(evictions: Mapping[str, Any]) -> list[str]:
    """What became of damaged prefixes, one line each, and of the requests."""
    lines = ["damaged prefix  readers failed  evicted s  recomputed s"]
    for number, each in enumerate(evictions["prefixes"], 1):
        seconds = ["-" if each[name] is None else f"{each[name]:.2f}" for name in ("evicted_s", "recomputed_s")]
        lines.append(f"{number:<14}  {each['failed']:>14}  {seconds[0]:>9}  {seconds[1]:>12}")
    lines.append(f"requests: {evictions['finished']} finished, {evictions['failed']} failed")
    return lines


class Display:
    """Progress. Use it as a context manager."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._live: Any = None
        self._said_at = 0.0
        self._status = ""

    def __enter__(self) -> Display:
        if sys.stdout.isatty():
            try:
                from rich.live import Live
            except ImportError:
                return self
            self._live = Live(refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def update(self, status: str, elapsed: float) -> None:
        """Show how things stand."""
        if self._live is not None:
            self._live.update(self._rich_table(f"{status}, {elapsed:.0f} s"))
            return
        now = time.monotonic()
        if status != self._status or now - self._said_at >= _LINE_SECONDS:
            self._status, self._said_at = status, now
            total = _total(self._score.tallies())
            print(
                f"{elapsed:5.0f} s  {status}: {total.injected} on settled slots, {total.detected} detected, "
                f"{total.missed} missed, {total.unguarded} unguarded, {len(self._score.waiting)} waiting, "
                f"{len(self._score.false_alarms)} findings unexplained",
                flush=True,
            )

    def _rich_table(self, title: str) -> Any:
        from rich.table import Table

        table = Table(title=title)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "class" else "right")
        tallies = self._score.tallies()
        for name, tally in tallies.items():
            table.add_row(*_cells(name, tally))
        table.add_section()
        table.add_row(*_cells("total", _total(tallies)))
        return table

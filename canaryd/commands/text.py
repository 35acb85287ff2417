"""Text for a terminal of 80 columns."""

from __future__ import annotations

import os
import sys
import textwrap
import time

WIDTH = 80
_COLOURS = {"ok": "32", "degraded": "33", "corrupt": "31;1", "unreachable": "31;1"}


def paragraph(label: str, text: str) -> list[str]:
    """A labelled paragraph; lines behind the first are indented."""
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:9}", subsequent_indent=" " * 9) or [label]


def ago(seconds: float | None) -> str:
    """An age, as short as is useful."""
    if seconds is None:
        return "never"
    return f"{duration(seconds)} ago"


def duration(seconds: float) -> str:
    """Seconds as text: `4.2 s`, `93 s`, `12 min`, `3.4 h`, `2.1 d`."""
    for limit, size, unit in ((10, 1, "s"), (120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if limit in (10, 172800) else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} d"


def moment(unix: float | None) -> str:
    """A time in UTC."""
    return "-" if unix is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix))


def coloured(word: str) -> str:
    """The word in capitals, in its colour where a person looks."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\x1b[{_COLOURS.get(word, '0')}m{word.upper()}\x1b[0m"
    return word.upper()


def device(uuid: str) -> str:
    """A GPU's UUID, short enough for a line."""
    return uuid if len(uuid) <= 16 else f"{uuid[:13]}..."


def cut(text: str, width: int) -> str:
    """Text of at most `width` columns."""
    return text if len(text) <= width else f"{text[: width - 3]}..."

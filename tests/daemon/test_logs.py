"""Log lines: readable as text, parsable as JSON, and free of raw bytes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from canaryd import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(style: str, level: str = "info") -> tuple[io.StringIO, logs.EventLogger]:
    stream = io.StringIO()
    logs.configure(style=style, level=level, stream=stream)  # type: ignore[arg-type]
    return stream, logs.event_logger("canaryd.test")


def test_json_lines_are_objects() -> None:
    stream, log = lines("json")
    log.warning("two\nlines", slots=3, name='a "b"', raw=b"\x01\x02", time="shadow")
    (document,) = map(json.loads, stream.getvalue().splitlines())
    assert document["event"] == "two\nlines"
    assert (document["level"], document["slots"], document["name"]) == ("warning", 3, 'a "b"')
    assert document["raw"] == "<2 bytes>"
    assert document["time"] != "shadow"


def test_text_lines_quote_and_bound_values() -> None:
    stream, log = lines("text")
    log.info("event", why="two words", empty="", long="x" * 5000)
    (line,) = stream.getvalue().splitlines()
    assert 'event why="two words" empty=""' in line
    assert len(line) < 2200


def test_the_level_counts() -> None:
    stream, log = lines("text", "warning")
    log.info("quiet")
    log.error("loud")
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["loud"]

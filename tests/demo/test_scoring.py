"""Which finding belongs to which fault, and what counts as found."""

from __future__ import annotations

from typing import Any

import pytest

from canaryd.demo.display import table_lines
from canaryd.demo.scoring import FaultRecord, Score, Sighting


def fault(**fields: Any) -> FaultRecord:
    defaults: dict[str, Any] = {
        "number": 1,
        "name": "word",
        "checks": frozenset({"content"}),
        "group": "full",
        "pages": frozenset({5}),
        "slots": frozenset({83}),
        "requests": frozenset(),
        "settled": True,
        "at": 100.0,
    }
    return FaultRecord(**(defaults | fields))


def finding(**fields: Any) -> Sighting:
    defaults: dict[str, Any] = {
        "identity": "a",
        "check": "content",
        "group": "full",
        "pages": frozenset({5}),
        "ranges": ((83, 83),),
        "request": "",
        "seen": 100.5,
    }
    return Sighting(**(defaults | fields))


def test_a_finding_on_the_slot_is_the_detection() -> None:
    score = Score(["word"])
    score.add(fault())
    score.see(finding())
    tally = score.tallies()["word"]
    assert (tally.injected, tally.detected, tally.missed, tally.unguarded) == (1, 1, 0, 0)
    assert tally.seconds == [0.5]
    assert score.false_alarms == []


def test_a_finding_may_be_seen_before_the_fault_is_reported() -> None:
    score = Score(["word"])
    score.see(finding())
    assert len(score.false_alarms) == 1
    score.add(fault())
    assert score.false_alarms == []
    assert score.tallies()["word"].detected == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"pages": frozenset({6}), "ranges": ((96, 96),)},
        {"group": "sliding"},
        {"seen": 99.0},
    ],
)
def test_a_finding_elsewhere_is_a_false_alarm(fields: dict[str, Any]) -> None:
    score = Score(["word"])
    score.add(fault())
    score.see(finding(**fields))
    assert len(score.false_alarms) == 1
    assert score.tallies()["word"].detected == 0


def test_another_slot_or_check_of_the_page_explains_but_does_not_detect() -> None:
    score = Score(["word"])
    score.add(fault())
    score.see(finding(identity="b", ranges=((80, 82),)))
    score.see(finding(identity="c", check="token"))
    assert score.false_alarms == []
    score.judge(1, stands=True)
    assert score.tallies()["word"].missed == 1


def test_a_finding_behind_the_fault_s_end_is_a_false_alarm() -> None:
    score = Score(["word"])
    score.add(fault(ended=100.2))
    score.see(finding())
    assert len(score.false_alarms) == 1


def test_rows_of_a_touched_request_belong_to_the_fault() -> None:
    score = Score(["word"])
    score.add(fault(name="word", checks=frozenset({"token"}), requests=frozenset({"r7"})))
    score.see(finding(check="token", pages=frozenset({99}), ranges=(), request="r7"))
    assert score.tallies()["word"].detected == 1


@pytest.mark.parametrize(("settled", "stands"), [(False, True), (True, False), (False, False)])
def test_what_was_not_guarded_or_legally_overwritten_is_unguarded(settled: bool, stands: bool) -> None:
    score = Score(["word"])
    score.add(fault(settled=settled))
    score.judge(1, stands=stands)
    tally = score.tallies()["word"]
    assert (tally.injected, tally.missed, tally.unguarded) == (0, 0, 1)


def test_an_unsettled_fault_that_was_found_is_still_unguarded() -> None:
    score = Score(["word"])
    score.add(fault(settled=False))
    score.see(finding())
    tally = score.tallies()["word"]
    assert (tally.injected, tally.detected, tally.unguarded) == (0, 0, 1)
    assert score.false_alarms == []


def test_a_late_detection_takes_a_miss_back() -> None:
    score = Score(["word"])
    score.add(fault())
    score.judge(1, stands=True)
    score.see(finding())
    assert score.tallies()["word"].missed == 0


def test_a_finding_is_read_from_the_daemon_s_document() -> None:
    detail = {"group": "full", "pages": [5], "slots": [[80, 83]], "row": "r#7#12"}
    sighting = Sighting.of({"id": "x-1", "count": 1, "check": "content", "detail": detail}, 3.0)
    assert sighting == finding(identity="x-1 1", ranges=((80, 83),), request="r#7", seen=3.0)


def test_the_table_shows_every_class_and_the_total() -> None:
    score = Score(["word", "page"])
    score.add(fault())
    score.see(finding())
    lines = table_lines(score)
    assert lines[2].split() == ["word", "1", "1", "1", "0", "0", "0.50", "0.50"]
    assert lines[3].split() == ["page", "0", "0", "0", "0", "0", "-", "-"]
    assert lines[5].split()[:2] == ["total", "1"]
    assert lines[-1] == "false alarms: 0"

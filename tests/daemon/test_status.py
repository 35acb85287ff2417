"""The status document in every state: the word, the advice, and how it looks in 80 columns."""

from __future__ import annotations

from typing import Any

import pytest

from canaryd.commands.status import render
from canaryd.commands.text import duration
from canaryd.findings import Finding
from canaryd.status.document import finding_status
from canaryd.status.models import EngineStatus, FindingStatus, StatusDocument, WorkerStatus
from canaryd.status.problems import find_problems, healthy

GPU = "GPU-00000000-0000-0000-0000-000000000001"
UNIX = 1_800_000_000.0


def engine(**more: Any) -> EngineStatus:
    counts = {name: {} for name in ("mismatches", "skipped", "suspects_dismissed", "reblessed")}
    numbers = dict.fromkeys(
        ("rows_open", "ops_open", "ops_stalled", "slots_stamped", "slots_verified", "bytes_verified", "message_gaps"), 0
    )
    values = counts | numbers | {
        "engine": "llm", "gpu_uuid": GPU, "state": "attached", "refusal": "", "info": {}, "last_contact_age": 0.1,
        "slots": {"settled": 4000}, "described_ratio": 1.0, "unguarded_ratio": 0.03, "pass_coverage_ratio": 0.4,
        "pass_last_completion": UNIX - 5, "pass_last_age": 5.0, "pass_last_seconds": 4.5, "pass_last_slots": 3900,
        "oldest_unverified_age": 5.0, "stamps_lost": 0, "busy_seconds": 1.0, "busy_share": 0.004,
        "process_visible": True, "geometry": [],
    }  # fmt: skip
    return EngineStatus(**(values | more))


def worker(**more: Any) -> WorkerStatus:
    values = {
        "device": GPU, "state": "ready", "pid": 7, "description": "a GPU", "restarts": 0, "resident_bytes": 1,
        "launches": {}, "selftest_age": 9.0, "selftest_failures": 0,
    }  # fmt: skip
    return WorkerStatus(**(values | more))


def finding(number: int = 1, check: str = "content", **more: Any) -> FindingStatus:
    detail = {"group": "full", "pages": [number], "slots": [[number, number]], "classification": "bit_flip"}
    made = Finding(
        id=f"0a1b2c3d-{number:06d}", engine="llm:tp1", gpu_uuid=GPU, check=check, opened=UNIX, last_seen=UNIX,
        process="p", detail=detail, **more,
    )  # fmt: skip
    return finding_status(made, UNIX + 60)


def document(
    engines: list[EngineStatus], workers: list[WorkerStatus], findings: list[FindingStatus], **more: Any
) -> dict[str, Any]:
    problems = find_problems(findings, engines, workers, unwritten=0, max_age_idle=60.0, uptime=100.0)
    first = problems[0] if problems else healthy(engines)
    values = {
        "status_version": 1, "time": UNIX, "running": True, "pid": 1, "overall": first.overall,
        "meaning": first.meaning, "action": first.action, "see": first.see, "problems": problems, "max_age_idle": 60.0,
        "version": "1.0", "config_source": "defaults", "uptime": 100.0, "engines": engines, "workers": workers,
        "findings_open": len(findings), "findings": findings, "findings_unwritten": 0, "findings_write_failures": 0,
        "attach_failures": {}, "messages_rejected": {},
    }  # fmt: skip
    return StatusDocument(**(values | more)).model_dump(mode="json")


STATES = [
    ("fine", [engine()], [worker()], [], "ok", "OK", "4000 slots"),
    ("idle", [engine(slots={}, pass_last_age=None)], [worker()], [], "ok", "OK", "idle"),
    ("first pass", [engine(pass_last_age=None)], [worker()], [], "ok", "OK", "not complete"),
    ("alone", [], [worker()], [], "degraded", "DEGRADED", "No engine"),
    ("stalled", [engine(state="stalled", last_contact_age=70.0)], [worker()], [], "degraded", "DEGRADED", "70 s"),
    ("gone", [engine(state="gone")], [worker()], [], "degraded", "DEGRADED", "ended"),
    ("refused", [engine(state="refused", refusal="Why. How.")], [worker()], [], "degraded", "DEGRADED", "Why. How."),
    ("down", [engine()], [worker(state="waiting")], [], "degraded", "DEGRADED", "waiting"),
    ("blind", [engine()], [worker(selftest_failures=1)], [], "degraded", "DEGRADED", "silence means nothing"),
    ("hung op", [engine(ops_stalled=1)], [worker()], [], "degraded", "DEGRADED", "never ended"),
    ("late", [engine(oldest_unverified_age=130.0)], [worker()], [], "degraded", "DEGRADED", "130 s"),
    ("open", [engine(unguarded_ratio=0.7)], [worker()], [], "degraded", "DEGRADED", "70%"),
    ("NaN", [engine()], [worker()], [finding(check="nonfinite")], "degraded", "DEGRADED", "NaN"),
    ("damaged", [engine()], [worker()], [finding(readers=1)], "corrupt", "CORRUPT", "live requests read 1"),
    ("all", [engine(state="stalled")] * 9, [worker(state="starting")] * 9, [finding(n) for n in range(99)],
     "corrupt", "CORRUPT", "99 findings"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "engines", "workers", "found", "word", "shown", "said"), STATES)
def test_every_state_has_its_word_and_fits_a_terminal(
    name: str,
    engines: list[EngineStatus],
    workers: list[WorkerStatus],
    found: list[FindingStatus],
    word: str,
    shown: str,
    said: str,
) -> None:
    made = document(engines, workers, found)
    assert made["overall"] == word
    lines = render(made, failure=None, now=UNIX)
    assert shown in lines[0]
    assert said in " ".join(" ".join(lines).split())
    assert len(lines) <= 23  # and the prompt
    for verbose in (False, True):
        every = render(made, failure="no daemon answers", now=UNIX + 3600, verbose=verbose)
        assert max(len(line) for line in every) <= 80
        assert "60 min old" in " ".join(" ".join(every).split())


def test_only_problems_are_shown_on_demand() -> None:
    assert render(document([engine()], [worker()], []), failure=None, now=UNIX, only_problems=True) == [
        "canaryd: all is well"
    ]
    both = document([engine(state="stalled")], [worker(state="waiting")], [])
    text = "\n".join(render(both, failure=None, now=UNIX, only_problems=True))
    assert text.count("meaning") == 2
    assert [each["code"] for each in both["problems"]] == ["worker_down", "stalled"]


def test_durations_are_short() -> None:
    assert [duration(each) for each in (0.0, 9.94, 100.0, 600.0, 9000.0, 864000.0)] == [
        "0.0 s", "9.9 s", "100 s", "10 min", "2.5 h", "10.0 d",
    ]  # fmt: skip

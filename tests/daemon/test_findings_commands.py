"""`canaryd findings`, with and without a daemon; and what a bundle for a bug report must not hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canaryd.cli import main
from canaryd.config import Config
from canaryd.findings import Finding, FindingsFile
from canaryd.findings.export import bundle
from canaryd.findings.finding import Hardware
from canaryd.status import statefile
from daemon.harness import Daemon, EngineProcess, Folder, wait_for

DETAIL = {"group": "full", "pages": [3], "slots": [[12, 13]], "slot_count": 2, "classification": "page"}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `state_dir` whose daemon is dead."""
    monkeypatch.setenv("CANARYD_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("CANARYD_HTTP__PORT", "0")
    return tmp_path


def journal(state: Path) -> FindingsFile:
    return FindingsFile(state, file_bytes=1 << 20, files=4, max_open=100)


def opened(state: Path, *details: dict[str, Any]) -> list[Finding]:
    file = journal(state)
    added = file.record_opened([("llm", "host", "content", "p", detail) for detail in details])
    file.close()
    return added


def test_a_dead_daemon_s_findings_are_listed_shown_and_acknowledged(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = opened(state, DETAIL, DETAIL | {"pages": [4]})
    assert main(["findings", "list"]) == 0
    listed = capsys.readouterr().out
    assert first.id in listed
    assert max(map(len, listed.splitlines())) <= 80
    assert main(["findings", "show", first.id]) == 0
    shown = capsys.readouterr().out
    assert "software likely" in shown
    assert "docs/runbook.md#class-page" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["findings", "ack", first.id, "--note", "replaced", "--by", "ann"]) == 0
    capsys.readouterr()
    assert main(["findings", "list", "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)["findings"]] == [second.id]
    assert main(["findings", "show", first.id]) == 0
    assert "by ann" in capsys.readouterr().out
    assert main(["findings", "ack", "--all"]) == 0
    capsys.readouterr()
    assert main(["findings", "list"]) == 0
    assert capsys.readouterr().out == "no finding is open\n"


def test_watch_repeats_until_it_is_interrupted(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("canaryd.commands.status.time.sleep", sleep)
    assert main(["watch", "-n", "0.5"]) == 3
    assert naps == [0.5] * 3
    assert capsys.readouterr().err.count("no daemon runs here") == 3


def test_what_is_not_open_cannot_be_acknowledged(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = opened(state, DETAIL)
    assert main(["findings", "ack", one.id, "nonsense"]) == 1
    assert "'nonsense'" in capsys.readouterr().err
    assert main(["findings", "show", "nonsense"]) == 1
    assert main(["findings", "ack"]) == 1
    assert [each.id for each in journal(state).open] == [one.id]


def test_an_export_holds_nothing_private(state: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    secrets = {"row": "SECRET-request", "detail": "SECRET-text", "stored_sum": 0x5EC2E7, "tokens": ["SECRET-token"]}
    (one,) = opened(state, DETAIL | secrets)
    engine = {
        "engine": "llm", "gpu_uuid": "host", "refusal": "SECRET-handle", "geometry": [{"group": "full"}],
        "info": {"kind": "vllm", "model": "SECRET-model", "name": "SECRET-name"}, "process": "SECRET-process",
    }  # fmt: skip
    worker = {"device": "host", "pid": 1, "description": "host memory", "SECRET": "SECRET"}
    problem = {"code": "corruption", "meaning": "SECRET"}
    status = {"engines": [engine], "workers": [worker], "problems": [problem], "config_source": "SECRET"}
    statefile.write(state, json.dumps(status))
    target = tmp_path / "bundle.json"
    assert main(["findings", "export", one.id, "-o", str(target)]) == 0
    text = target.read_text()
    assert "SECRET" not in text
    assert str(0x5EC2E7) not in text
    assert str(state) not in text
    made = json.loads(text)
    assert made["engine"]["geometry"] == [{"group": "full"}]
    assert made["finding"]["detail"] == DETAIL
    assert made["status"]["problems"] == ["corruption"]
    assert {"torch", "pyzmq"} <= set(made["packages"])


def test_an_export_needs_no_status_and_takes_the_counters() -> None:
    hardware = Hardware(time=1.0, uncorrected=2)
    one = Finding(
        id="x", engine="e", gpu_uuid="g", check="content", opened=1.0, process="p", detail={}, hardware=hardware
    )
    made = bundle(one, None, Config())
    assert (made["engine"], made["worker"], made["gpu"]["uncorrected"]) == (None, None, 2)
    assert "socket_dir" not in made["config"]


@pytest.fixture
def folder() -> Iterator[Folder]:
    made = Folder()
    yield made
    made.remove()


@pytest.mark.slow
def test_a_running_daemon_follows_its_findings(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STATE_DIR", folder.state), ("SOCKET_DIR", folder.sockets), ("HTTP__PORT", 0)):
        monkeypatch.setenv(f"CANARYD_{name}", str(value))
    daemon = Daemon(folder, WORKERS__HOST="on")
    engine = EngineProcess(folder)
    try:
        wait_for("the attachment", lambda: engine.ask("stats")["state"] == "attached")
        slots = engine.write("r1", 4)
        wait_for("settled slots", lambda: daemon.settled("tiny") == 4)
        engine.flip(slots[2])

        def there() -> list[dict[str, Any]]:
            found = json.loads(daemon.get("/findings")[1])
            return [each for each in found if (each["standing"], each["readers"]) == ("there", 1)]

        (finding,) = wait_for("its standing", there)
        assert main(["findings", "ack", finding["id"]]) == 0
        wait_for("the gauge", lambda: daemon.metric("canaryd_findings_open", engine="tiny", check="content") == 0)
        assert daemon.metric("canaryd_mismatches_total", engine="tiny", check="content") == 1
        assert main(["status", "-x"]) == 0
    finally:
        engine.kill()
        daemon.process.kill()
        daemon.process.wait()
    assert main(["status"]) == 3

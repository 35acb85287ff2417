"""The demo as a user runs it: separate processes, a real engine, real faults, a fixed seed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "canaryd.cli", "demo"]
LIMIT_SECONDS = 240


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*COMMAND, "--json", str(report), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    return done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr


def children_of(folder: Path) -> list[str]:
    """Processes that were started with a folder of this test."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in line and entry.name != str(os.getpid()):
            found.append(entry.name)
    return found


def check(code: int, report: dict[str, Any], output: str) -> None:
    assert code == 0, output
    assert report["false_alarms"] == 0
    assert report["missed"] == 0
    assert report["injected"] == report["detected"] > 0
    assert all(tally["injected"] > 0 for tally in report["classes"].values())
    assert {"plan", "write", "verify", "digest"} <= set(report["launches"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["native", "sglang"])
def test_every_fault_is_found_and_nothing_else(tmp_path: Path, scheme: str) -> None:
    code, report, output = run(tmp_path, "--duration", "14", "--seed", "11", "--scheme", scheme)
    check(code, report, output)
    assert report["scheme"] == scheme
    assert not children_of(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.slow
def test_sliding_windows(tmp_path: Path) -> None:
    check(*run(tmp_path, "--duration", "20", "--seed", "12", "--model", "sliding"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_a_healthy_engine_gives_no_finding(tmp_path: Path, model: str) -> None:
    code, report, output = run(tmp_path, "--no-faults", "--duration", "6", "--model", model)
    assert code == 0, output
    assert report["findings"] == 0
    assert report["launches"]["compare"] > 0


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--duration", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "injecting" in line:
            break
    demo.send_signal(signal.SIGINT)
    output = demo.stdout.read()
    assert demo.wait(60) == 130, output
    deadline = time.monotonic() + 5
    while children_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children_of(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_async_needs_a_gpu(tmp_path: Path) -> None:
    code, _, output = run(tmp_path, "--mode", "async")
    assert code != 0
    assert "needs --device cuda" in output


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_on_a_gpu(tmp_path: Path, mode: str, model: str) -> None:
    check(*run(tmp_path, "--device", "cuda", "--mode", mode, "--model", model, "--duration", "20", "--seed", "13"))

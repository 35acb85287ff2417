"""The demo as a user runs it: separate processes, a real engine, real faults, a fixed seed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "canaryd.cli", "demo"]
LIMIT_SECONDS = 240


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: Unix sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as name:
        yield Path(name)


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    report = folder / "report.json"
    done = subprocess.run(
        [*COMMAND, "--json", str(report), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
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
def test_every_fault_is_found_and_nothing_else(folder: Path, scheme: str) -> None:
    code, report, output = run(folder, "--duration", "14", "--seed", "11", "--scheme", scheme)
    check(code, report, output)
    assert report["scheme"] == scheme
    assert not children_of(folder)
    assert [path.name for path in folder.iterdir()] == ["report.json"]


@pytest.mark.slow
def test_sliding_windows(folder: Path) -> None:
    check(*run(folder, "--duration", "20", "--seed", "12", "--model", "sliding"))


@pytest.mark.slow
def test_a_damaged_prefix_is_evicted_and_recomputed_while_others_go_on(folder: Path) -> None:
    code, report, output = run(folder, "--on-finding", "evict", "--duration", "6", "--seed", "14")
    check(code, report, output)
    evictions = report["evictions"]
    assert len(evictions["prefixes"]) == report["injected"]
    for prefix in evictions["prefixes"]:
        assert prefix["failed"] > 0
        assert 0 < prefix["evicted_s"] < prefix["recomputed_s"]
    # nobody fails but the readers
    assert evictions["failed"] == sum(prefix["failed"] for prefix in evictions["prefixes"])
    assert evictions["finished"] > 0
    assert "damaged prefix  readers failed  evicted s  recomputed s" in output


def test_eviction_needs_shared_prefixes(folder: Path) -> None:
    code, _, output = run(folder, "--on-finding", "evict", "--model", "sliding")
    assert code == 2
    assert "shares no prefixes" in output


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_a_healthy_engine_gives_no_finding(folder: Path, model: str) -> None:
    code, report, output = run(folder, "--no-faults", "--duration", "6", "--model", model)
    assert code == 0, output
    assert report["findings"] == 0
    assert report["launches"]["compare"] > 0


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(folder: Path) -> None:
    demo = subprocess.Popen(
        [*COMMAND, "--duration", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "injecting" in line:
            break
    demo.send_signal(signal.SIGINT)
    output = demo.stdout.read()
    assert demo.wait(60) == 130, output
    deadline = time.monotonic() + 5
    while children_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children_of(folder)
    assert list(folder.iterdir()) == []


def test_async_needs_a_gpu(folder: Path) -> None:
    code, _, output = run(folder, "--mode", "async")
    assert code != 0
    assert "needs --device cuda" in output


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_on_a_gpu(folder: Path, mode: str, model: str) -> None:
    check(*run(folder, "--device", "cuda", "--mode", mode, "--model", model, "--duration", "20", "--seed", "13"))

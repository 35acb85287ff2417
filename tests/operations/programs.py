"""Real programs for operations tests: own ports on 127.0.0.1, own folders, every wait bounded, stopped by pid."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60.0


def get(url: str) -> str:
    """The body of a GET. Raises OSError for anything but success."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def wait_for(what: str, ready: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first true value of `ready`, which is asked every 50 ms; an OSError counts as not yet."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = ready()
        except OSError as error:
            last = error
        else:
            if last:
                return last
        time.sleep(0.05)
    pytest.fail(f"waited {seconds:.0f} seconds in vain for {what}; last: {last!r}")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Program:
    """A started program: where it listens, and its log."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]


class Programs:
    """Starts programs in `folder` and stops all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Program] = []

    def start(self, name: str, command: list[str], url: str, *, healthy: str, **environment: str) -> Program:
        """Run `command` until `url + healthy` answers."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd=self._folder,
            )
        program = Program(url, log, process)
        self._started.append(program)

        def answers() -> bool:
            assert process.poll() is None, f"{name} ended with status {process.returncode}:\n{log.read_text()}"
            return bool(get(url + healthy)) or True

        wait_for(f"{name} to answer", answers)
        return program

    def stop(self) -> None:
        """SIGTERM to each, in reverse order; SIGKILL to what is there after ten seconds."""
        for program in reversed(self._started):
            program.process.terminate()
            try:
                program.process.wait(10)
            except subprocess.TimeoutExpired:
                program.process.kill()
                program.process.wait()
            print(f"--- {program.log.name}\n{program.log.read_text()[-3000:]}")


@dataclass
class Daemon:
    """A running `canaryd serve`."""

    url: str
    socket_dir: Path
    state_dir: Path


@dataclass
class Monitoring:
    """A Prometheus that scrapes the daemon under the repository's rules, and an Alertmanager that tells `alerts`."""

    prometheus: str
    alerts: queue.Queue[dict[str, Any]]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        answer = get(f"{self.prometheus}/api/v1/query?query={urllib.parse.quote(expression)}")
        return list(json.loads(answer)["data"]["result"])

    def wait_for_alert(self, name: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """The first notification about alert `name`; others are dropped."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                alert = self.alerts.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no notification about {name} within {seconds:.0f} seconds")
            if alert["labels"]["alertname"] == name:
                return alert

"""Real processes for the tests: a daemon, and engines that attach to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

Result = TypeVar("Result")
PATIENCE = 20.0
"""Generous: other work may share the machine. No test measures by it."""
_ENGINE = Path(__file__).with_name("engine.py")


def wait_for(what: str, look: Callable[[], Result], patience: float = PATIENCE) -> Result:
    """The first true value of `look`."""
    deadline = time.monotonic() + patience
    while not (seen := look()):
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain for {what}"
        time.sleep(0.02)
    return seen


class Folder:
    """Short-named directories of one daemon (an AF_UNIX path has 107 bytes at most)."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="cd-", dir="/tmp"))
        self.sockets = self.root / "s"
        self.state = self.root / "st"

    def remove(self) -> None:
        shutil.rmtree(self.root)


class Daemon:
    """A running `canaryd serve`; settings are environment variables without their prefix."""

    def __init__(self, folder: Folder, **settings: str) -> None:
        self.folder = folder
        environment = {
            "CANARYD_SOCKET_DIR": str(folder.sockets),
            "CANARYD_STATE_DIR": str(folder.state),
            "CANARYD_HTTP__PORT": "0",
            "CANARYD_WATCH__TICK": "0.05",
            "CANARYD_WATCH__MAX_AGE_LIVE": "0.5",
            "CANARYD_WATCH__MAX_HOST_SHARE": "1.0",
            "CANARYD_WORKERS__GPUS": "off",
            "CANARYD_WORKERS__RESTART_BACKOFF": "0.05",
            **{f"CANARYD_{name}": value for name, value in settings.items()},
        }
        port = folder.state / "http.port"
        port.unlink(missing_ok=True)  # a daemon that was killed leaves it
        self.log = folder.root / "daemon.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "canaryd.cli", "serve"], env=os.environ | environment, stderr=log
            )
        wait_for("the port", lambda: self.process.poll() is not None or port.exists())
        assert self.process.poll() is None, self.log.read_text()
        self.port = int(port.read_text())

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.get("/status")[1])
        return document

    def engine_state(self, name: str) -> str:
        return next((each["state"] for each in self.status()["engines"] if each["engine"] == name), "unknown")

    def worker(self, device: str = "host") -> dict[str, Any]:
        return next((each for each in self.status()["workers"] if each["device"] == device), {})

    def metric(self, name: str, **labels: str) -> float | None:
        """The sum of the samples with these labels, None if there is none."""
        text = self.get("/metrics")[1]
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    def settled(self, engine: str) -> float:
        return self.metric("canaryd_slots", engine=engine, state="settled") or 0.0

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


class EngineProcess:
    """A tiny engine in a process of its own."""

    def __init__(self, folder: Folder, name: str = "tiny", pages: int = 32) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(_ENGINE), str(folder.sockets), name, str(pages)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        assert self._answer() == "ready"

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, do: str, **arguments: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        return self._answer()

    def write(self, row: str, tokens: int) -> list[int]:
        slots: list[int] = self.ask("write", row=row, tokens=tokens)
        return slots

    def flip(self, slot: int, *, region: int = 1, byte: int = 23, bit: int = 7) -> None:
        self.ask("flip", slot=slot, region=region, byte=byte, bit=bit)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()

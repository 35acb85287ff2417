"""The demo's child processes: none is left behind, and what they logged is kept for when something fails."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 15.0
_LOG_LINES = 25


class ChildFailed(Exception):
    """A child process ended, or did not answer."""


def _end_with_parent() -> None:
    """In the child: be terminated when the demo is, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One child process with its log.

    Args:
        name: also the name of its log in `folder`.
        module, arguments: `python -m module arguments`.
        environment: variables over the demo's own.
        talks: whether it takes JSON lines on its standard input and gives some on its output.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        talks: bool = False,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C is the demo's to handle
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - the demo has started no thread that holds a lock here
                text=True,
            )
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        if talks and self._process.stdout is not None:
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self.answers.put(json.loads(line))

    def tell(self, command: Mapping[str, Any]) -> None:
        """Send one command. Raises ChildFailed if it cannot be sent."""
        stdin = self._process.stdin
        if stdin is None:
            raise ChildFailed(f"the {self.name} process takes no commands")
        try:
            stdin.write(json.dumps(command) + "\n")
            stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise ChildFailed(f"the {self.name} process takes no commands any more") from error

    def check(self) -> None:
        """Raises ChildFailed if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise ChildFailed(f"the {self.name} process ended with status {code}")

    def wait_for(self, event: str, seconds: float) -> dict[str, Any]:
        """Its next answer, which must be `event`. Raises ChildFailed."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                answer = self.answers.get(timeout=0.2)
            except queue.Empty:
                self.check()
                continue
            if answer.get("event") != event:
                raise ChildFailed(f"the {self.name} process said {answer} instead of {event}")
            return answer
        raise ChildFailed(f"the {self.name} process did not say {event} within {seconds:.0f} s")

    def stop(self) -> int:
        """End it: end of input first, if it listens, then SIGTERM, then SIGKILL. Its exit status."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
                return self._process.wait(_STOP_SECONDS)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                pass  # it is terminated below
        if self._process.poll() is None:
            self._process.terminate()
            try:
                return self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def last_lines(self) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        except OSError as error:
            return f"(no log: {error})"

"""The GPU tests of the kernels under compute-sanitizer: `make sanitize-gpu`.

First the tests run plainly, which compiles the kernels; then once each under memcheck (accesses outside of any
allocation), initcheck (reads of memory that nobody wrote) and racecheck (hazards in shared memory), side by side. torch
allocates every tensor by itself for that, so that memory behind a tensor is nobody's; and the tests' poison is left out
under initcheck, since poisoned memory counts as written. Tests of graphs, of large pools and of compilation, and those
of the torch references, are left out: they show no other access, or cannot run without torch's cache of memory.

Ends with 0 if all is well, 1 if a tool found something or a test failed, 2 if a tool could not look at this GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "initcheck", "racecheck")
LEFT_OUT = ("reference", "64bit", "graph", "compile", "ten_thousand", "full_batch", "long_run", "vectors")
FOUND = 86
"""Exit status of compute-sanitizer when it found something; no status of pytest."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one run ended. `errors` is None where the tool gave no summary."""

    tool: str
    status: int | None
    errors: int | None
    tests: str
    seconds: float
    log: str

    @property
    def clean(self) -> bool:
        """The tool looked, found nothing, and every test passed."""
        return self.status == 0 and self.errors == 0

    def line(self) -> str:
        """One line of the summary."""
        found = "no summary" if self.errors is None else f"{self.errors} errors"
        ended = "ended by the time limit" if self.status is None else f"status {self.status}"
        return f"{self.tool:10} {found:12} {ended:24} {self.seconds:5.0f} s  {self.tests}"


def pytest_command(chosen: str | None, *, poison: bool) -> list[str]:
    """The tests' command line."""
    names = " and ".join(f"not {name}" for name in LEFT_OUT)
    expression = names if chosen is None else f"({chosen}) and {names}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-k", expression, "--durations=5"]
    return [*command, *([] if poison else ["--no-poison"]), "tests/kernels"]


def outcome(tool: str, log: str, status: int | None, seconds: float) -> Outcome:
    """Reads a run's log."""
    # racecheck counts hazards: "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)"
    summary = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", log)
    tests = re.findall(r"^\d+ (?:passed|failed|error).*$", log, re.M)
    return Outcome(
        tool=tool,
        status=status,
        errors=int(summary[-1][0] or summary[-1][1]) if summary else None,
        tests=tests[-1] if tests else "",
        seconds=seconds,
        log=log,
    )


def sanitized(tools: tuple[str, ...], program: str, chosen: str | None, limit: float) -> list[Outcome]:
    """Runs the tools side by side, each for at most `limit` seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for tool in tools:
            own = Path(folder) / tool
            command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
            command += pytest_command(chosen, poison=tool != "initcheck")
            with own.open("wb") as log:
                running[tool] = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"CANARYD_TEST_GPU": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        found = []
        for tool, process in running.items():
            try:
                status: int | None = process.wait(max(0.0, limit - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                status = None
            text = (Path(folder) / tool).read_text(encoding="utf-8", errors="replace")
            found.append(outcome(tool, text, status, time.monotonic() - began))
    return found


def main() -> int:
    """Runs the tests and the tools; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="EXPRESSION", help="as pytest's -k, in addition")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one tool (may be repeated); default: all")
    parser.add_argument("--limit", type=float, default=100, help="seconds for the tools (default: %(default)s)")
    options = parser.parse_args()
    program = shutil.which("compute-sanitizer")
    if program is None:
        sys.stderr.write("compute-sanitizer is missing; it is part of the CUDA toolkit\n")
        return 2
    plain = subprocess.run(
        pytest_command(options.only, poison=True),
        cwd=ROOT,
        env=os.environ | {"CANARYD_TEST_GPU": "1"},
        check=False,
    )
    if plain.returncode:
        return 1
    tools = tuple(options.tool or TOOLS)
    outcomes = sanitized(tools, program, options.only, options.limit)
    for one in outcomes:
        if not one.clean:
            sys.stdout.write(f"--- {one.tool}\n{one.log[-8000:]}\n")
    sys.stdout.write("".join(f"{one.line()}\n" for one in outcomes))
    if any("Device not supported" in one.log for one in outcomes):
        sys.stdout.write("compute-sanitizer does not support this GPU or its driver: nothing was looked at\n")
        return 2
    return 0 if all(one.clean for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

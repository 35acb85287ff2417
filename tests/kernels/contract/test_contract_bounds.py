"""No kernel and no reference touches memory outside its tensors, whatever slots, rows and offsets say.

The interpreter lets such accesses pass, and guard bands do not see reads: so the tensors lie between protected pages,
in a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "guarded.py"
ROOT = PROGRAM.parents[3]


def run_guarded(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_nothing_outside_the_tensors_is_touched(backend: str, seed: int) -> None:
    done = run_guarded(backend, str(seed))
    assert (done.returncode, done.stdout) == (0, "fenced 16 rounds\n"), done.stderr


@pytest.mark.slow
def test_an_access_outside_would_be_seen() -> None:
    assert run_guarded("triton", "0", "beyond").returncode == -signal.SIGSEGV

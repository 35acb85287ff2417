"""Row links touch nothing outside their tensors, whatever runs, pages and counts say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "guarded_links.py"
ROOT = PROGRAM.parents[3]


def run_guarded(*arguments):
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_nothing_outside_the_tensors_is_touched(backend, seed):
    done = run_guarded(backend, str(seed))
    assert (done.returncode, done.stdout) == (0, "fenced 24 rounds\n"), done.stderr


@pytest.mark.slow
def test_an_access_outside_would_be_seen():
    assert run_guarded("triton", "0", "beyond").returncode == -signal.SIGSEGV

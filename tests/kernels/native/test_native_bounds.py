"""Kernels of the daemon's own path touch nothing outside their tensors, whatever runs, pages, slots and counts say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROGRAMS = ("guarded_links.py", "guarded_stamp.py")


def run_guarded(program, *arguments):
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, str(HERE / program), *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_outside_the_tensors_is_touched(program, backend, seed):
    done = run_guarded(program, backend, str(seed))
    assert (done.returncode, done.stdout) == (0, "fenced 24 rounds\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_an_access_outside_would_be_seen(program):
    assert run_guarded(program, "triton", "0", "beyond").returncode == -signal.SIGSEGV

"""A bounded run of each fuzz target, with a new seed each time, and all that ever crashed one."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.seeds import inputs
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
RUNS = {"frames": 20_000, "stream": 1_500, "attach": 5_000, "config": 1_500, "findings": 5_000}


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_former_crashes(target: str) -> None:
    given = inputs(target)
    assert given
    for data in given:
        TARGETS[target](data)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_bounded_run(target: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1, 1 << 31)
    command = [sys.executable, "-m", "tests.fuzz", target, f"-runs={RUNS[target]}", f"-seed={seed}", "-max_len=600"]
    done = subprocess.run(
        [*command, f"-artifact_prefix={tmp_path}/"], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    crashes = [path.read_bytes() for path in tmp_path.iterdir()]
    assert done.returncode == 0, f"{' '.join(command)}\n{crashes}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert f"Done {RUNS[target]} runs" in done.stderr


def test_a_defect_ends_the_run(tmp_path: Path) -> None:
    """The fuzzer's own proof: a target that fails on one byte stops with an artifact."""
    script = (
        "import atheris, sys\n"
        "def target(data):\n    assert not data.startswith(b'C')\n"
        "atheris.Setup(sys.argv, target)\natheris.Fuzz()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "-runs=100000", "-seed=1", f"-artifact_prefix={tmp_path}/"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert [path.read_bytes()[:1] for path in tmp_path.iterdir()] == [b"C"]

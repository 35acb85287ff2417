"""What happens on machines that lack something: clear messages, and no test that is skipped where it must run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    quiet = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=120, check=False
    )


def _python_without(tmp_path: Path, what: str) -> Path:
    """An interpreter that fails when it is asked about `what`."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\ncase "$2" in *{what}*) exit 1 ;; esac\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("lacking", "remedy"), [("ensurepip", "apt-get install python3-venv"), ("version_info", "Python 3.11 or later")]
)
def test_set_up_names_the_remedy(lacking: str, remedy: str, tmp_path: Path) -> None:
    done = _make("venv", f"PYTHON={_python_without(tmp_path, lacking)}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert remedy in done.stderr
    assert not (tmp_path / "venv").exists()


def test_help_lists_the_targets() -> None:
    text = _make("help").stdout
    targets = "demo test fuzz test-operations test-gpu bench-gpu bench-cpu sanitize-gpu lint format venv"
    for target in targets.split():
        assert f"make {target}" in text


def test_gpu_target_fails_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = _make("test-gpu", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert "needs a GPU" in done.stdout + done.stderr


def _outcome(tmp_path: Path, marker: str, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run one test with the shared conftest, on a machine whose PATH has nothing."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "test_one.py").write_text(f"import pytest\n\n@pytest.mark.{marker}\ndef test_one():\n    {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n    operations: x\n")
    variables = {"PATH": str(tmp_path), "HOME": str(tmp_path), **variables}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_operations_test_is_skipped_with_a_remedy(tmp_path: Path) -> None:
    done = _outcome(tmp_path, "operations", "pass")
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "apt-get install prometheus" in done.stdout


@pytest.mark.parametrize("variable", [{"CI": "true"}, {"CANARYD_TEST_OPERATIONS": "1"}], ids=["ci", "target"])
def test_operations_test_must_run_in_ci(variable: dict[str, str], tmp_path: Path) -> None:
    done = _outcome(tmp_path, "operations", "pass", **variable)
    assert done.returncode == 1, done.stdout
    assert "must not be skipped here" in done.stdout
    assert "apt-get install prometheus" in done.stdout


def test_gpu_test_is_skipped_elsewhere(tmp_path: Path) -> None:
    done = _outcome(tmp_path, "gpu", "assert False")
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout

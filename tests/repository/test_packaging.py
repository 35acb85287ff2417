"""Pins, scripts and documentation of the repository as a package."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What comes with the interpreter, ourselves, and what torch's CUDA build pins on its own.
UNPINNED = re.compile(r"^(pip|wheel|canaryd|nvidia-.*|cuda-toolkit)$")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pins() -> dict[str, str]:
    files = (ROOT / name for name in ("requirements-dev.txt", "constraints-gpu.txt"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    wanted = [line for line in lines if line and not line.startswith(("#", "-c "))]
    pins = dict(line.split("==") for line in wanted)
    assert len(pins) == len(wanted)
    return {_normal(name): version for name, version in pins.items()}


def test_pins_are_exact_and_fit_every_build() -> None:
    pins = _pins()
    assert {"torch": "2.13.0", "triton": "3.7.1"}.items() <= pins.items()
    for name, version in pins.items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), f"{name}=={version} names a local or inexact version"


def _needed(name: str, seen: set[str]) -> set[str]:
    """`name` and all distributions that it needs here, as installed."""
    normal = _normal(name)
    if normal not in seen:
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            return seen  # needed on another platform or Python only
        seen.add(normal)
        for requirement in requirements:
            if "extra ==" not in requirement:
                needed = re.match(r"[\w.-]+", requirement)
                assert needed is not None
                _needed(needed.group(), seen)
    return seen


def test_everything_that_the_pins_bring_along_is_pinned() -> None:
    pins = _pins()
    seen: set[str] = set()
    for name in pins:
        _needed(name, seen)
    assert {name for name in seen if not UNPINNED.match(name)} <= set(pins)


def test_floors_of_the_package_are_not_above_the_pins() -> None:
    pins = _pins()
    floors = re.findall(r'"([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(floors) >= 8
    for name, floor in floors:
        pinned = pins.get(_normal(name))
        if pinned is not None:
            assert [int(part) for part in floor.split(".")] <= [int(part) for part in pinned.split(".")], name


def test_public_code_is_documented() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "D1", "--ignore", "D105,D107", "canaryd", "kernels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_ci_calls_the_readme_command_and_hides_nothing() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("exec make test")
    assert "set -euo pipefail" in script
    assert "|| true" not in script
    assert subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=False).returncode == 0


def test_readme_names_its_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme

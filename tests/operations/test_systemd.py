"""The systemd unit gives the daemon the directories that its configuration names, and systemd accepts it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "configs" / "systemd" / "canaryd.service"


def settings() -> dict[str, str]:
    """Every `Key=value` of the unit."""
    return dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))


def test_directories_are_those_of_the_default_configuration() -> None:
    defaults = yaml.safe_load((ROOT / "configs" / "canaryd.yaml").read_text())
    unit = settings()
    assert defaults["socket_dir"] == f"/run/{unit['RuntimeDirectory']}"
    assert defaults["state_dir"] == f"/var/lib/{unit['StateDirectory']}"
    assert f"TRITON_CACHE_DIR=/var/cache/{unit['CacheDirectory']}/" in unit["Environment"]
    assert unit["RuntimeDirectoryMode"] == "0700"


def test_runs_without_root_and_can_compile() -> None:
    unit = settings()
    assert unit["User"] not in {"", "root"}
    assert unit["CapabilityBoundingSet"] == ""
    assert "MemoryDenyWriteExecute" not in unit
    assert "PrivateDevices" not in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_it(tmp_path: Path) -> None:
    copy = tmp_path / "canaryd.service"
    copy.write_text(UNIT.read_text().replace("/opt/canaryd/bin/canaryd", sys.executable))
    command = ["systemd-analyze", "verify", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "canaryd.service" not in done.stderr

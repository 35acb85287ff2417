"""The command line: exit statuses, and one clear message for each way in which `serve` cannot start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml

import canaryd
from canaryd.config import Config
from daemon.harness import Daemon, Folder


@pytest.fixture
def folder() -> Iterator[Folder]:
    made = Folder()
    yield made
    made.remove()


def run(folder: Folder, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "CANARYD_SOCKET_DIR": str(folder.sockets),
        "CANARYD_STATE_DIR": str(folder.state),
        "CANARYD_HTTP__PORT": "0",
        "CANARYD_WORKERS__GPUS": "off",
    } | {f"CANARYD_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-m", "canaryd.cli", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_configuration_error_is_status_2(folder: Folder) -> None:
    done = run(folder, "serve", WATCH__TICK="soon")
    assert done.returncode == 2
    assert "watch.tick (CANARYD_WATCH__TICK): 'soon' is not legal" in done.stderr
    assert "Traceback" not in done.stderr
    assert not folder.sockets.exists()


def test_a_missing_file_is_status_2(folder: Folder) -> None:
    done = run(folder, "serve", "--config", "/nowhere.yaml")
    assert (done.returncode, "/nowhere.yaml" in done.stderr) == (2, True)


def test_a_busy_port_is_status_1_and_one_line(folder: Folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(folder, "serve", HTTP__PORT=str(taken.getsockname()[1]))
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("canaryd: ")]
    assert "CANARYD_HTTP__PORT" in line
    assert "Traceback" not in done.stderr
    assert not (folder.sockets / "engine.sock").exists()


def test_an_open_socket_dir_is_refused(folder: Folder) -> None:
    folder.sockets.mkdir(mode=0o755)
    folder.sockets.chmod(0o755)
    done = run(folder, "serve")
    assert (done.returncode, f"chmod 0700 {folder.sockets}" in done.stderr) == (1, True)


def test_a_socket_dir_that_is_a_link_is_refused(folder: Folder) -> None:
    folder.state.mkdir(mode=0o700)
    folder.sockets.symlink_to(folder.state)
    done = run(folder, "serve")
    assert (done.returncode, "is not a directory" in done.stderr) == (1, True)


@pytest.mark.slow
def test_one_daemon_per_directory_and_status(folder: Folder) -> None:
    daemon = Daemon(folder)
    try:
        done = run(folder, "serve")
        assert (done.returncode, "another canaryd" in done.stderr) == (1, True)
        status = run(folder, "status")
        assert status.returncode == 1
        assert "DEGRADED" in status.stdout
        as_json = run(folder, "status", "--json", "--url", f"http://127.0.0.1:{daemon.port}")
        assert '"status_version": 1' in as_json.stdout
    finally:
        assert daemon.stop() == 0
    gone = run(folder, "status", "--url", f"http://127.0.0.1:{daemon.port}")
    assert (gone.returncode, "no daemon answers" in gone.stderr) == (3, True)
    unasked = run(folder, "status", WATCH__TICK="x")
    assert (unasked.returncode, "watch.tick" in unasked.stderr) == (3, True)


def test_config_prints_what_is_in_force(folder: Folder) -> None:
    done = run(folder, "config", WATCH__TICK="0.3")
    shown = Config.model_validate(yaml.safe_load(done.stdout))
    assert (done.returncode, shown.watch.tick, shown.state_dir) == (0, 0.3, folder.state)


def test_help_teaches_and_version(folder: Folder) -> None:
    done = run(folder, "--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("serve", "status", "selftest", "demo", "CANARYD_HTTP__PORT"))
    assert run(folder, "--version").stdout == f"canaryd {canaryd.__version__}\n"
    assert run(folder).returncode == 2

"""Fixtures of operations tests: a live daemon, and the real Prometheus and Alertmanager around it."""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import Daemon, Monitoring, Programs, free_port

ROOT = Path(__file__).parents[2]
RULES = ROOT / "configs" / "prometheus" / "alerts.yml"
INTERVAL = "250ms"


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a short name: a Unix socket's path has 107 bytes, and pytest's folders are long."""
    with tempfile.TemporaryDirectory(prefix="canaryd-") as folder:
        yield Path(folder)


@pytest.fixture
def programs(tmp_path: Path, socket_dir: Path) -> Iterator[Programs]:
    """Starts programs and stops them before `socket_dir` goes; their logs are printed then, for a failure to show."""
    started = Programs(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def webhook() -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """A receiver of Alertmanager's notifications: its address, and each alert that arrives."""
    alerts: queue.Queue[dict[str, Any]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                alerts.put(alert)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", alerts
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def daemon(programs: Programs, tmp_path: Path, socket_dir: Path) -> Daemon:
    """A live daemon without a GPU that waits for engines at `socket_dir`."""
    port = free_port()
    programs.start(
        "canaryd",
        [sys.executable, "-m", "canaryd.cli", "serve", "--config", str(ROOT / "configs" / "canaryd.yaml")],
        f"http://127.0.0.1:{port}",
        healthy="/healthz",
        CANARYD_HTTP__PORT=str(port),
        CANARYD_SOCKET_DIR=str(socket_dir),
        CANARYD_STATE_DIR=str(tmp_path / "state"),
        CANARYD_WORKERS__HOST="on",
        CANARYD_WORKERS__GPUS="off",
        CANARYD_WATCH__MAX_AGE_LIVE="0.5",
        CANARYD_WATCH__MAX_AGE_IDLE="0.5",
        CANARYD_WATCH__MAX_ENGINE_LOSS="0.5",
    )
    return Daemon(f"http://127.0.0.1:{port}", socket_dir, tmp_path / "state")


@pytest.fixture
def monitoring(
    programs: Programs, daemon: Daemon, webhook: tuple[str, queue.Queue[dict[str, Any]]], tmp_path: Path
) -> Monitoring:
    """Prometheus and Alertmanager around the daemon."""
    address, alerts = webhook
    manager = f"127.0.0.1:{free_port()}"
    routes = {"receiver": "test", "group_wait": "50ms", "group_interval": "1s", "group_by": ["..."]}
    receivers = [{"name": "test", "webhook_configs": [{"url": address, "send_resolved": True}]}]
    _write(tmp_path / "alertmanager.yml", {"route": routes, "receivers": receivers})
    programs.start(
        "alertmanager",
        [
            "prometheus-alertmanager",
            f"--config.file={tmp_path / 'alertmanager.yml'}",
            f"--storage.path={tmp_path / 'alertmanager'}",
            f"--web.listen-address={manager}",
            "--cluster.listen-address=",
        ],
        f"http://{manager}",
        healthy="/-/ready",
    )
    server = f"127.0.0.1:{free_port()}"
    scrape = {"job_name": "canaryd", "static_configs": [{"targets": [daemon.url.removeprefix("http://")]}]}
    _write(
        tmp_path / "prometheus.yml",
        {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(RULES)],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
            "scrape_configs": [scrape],
        },
    )
    prometheus = programs.start(
        "prometheus",
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'prometheus'}",
            f"--web.listen-address={server}",
        ],
        f"http://{server}",
        healthy="/-/ready",
    )
    return Monitoring(prometheus.url, alerts)


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(document))

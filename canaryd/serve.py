"""`canaryd serve`: puts the supervisor, the HTTP server and the signals together."""

from __future__ import annotations

import json
import os
import signal
from types import FrameType

from canaryd import __version__
from canaryd.config import PORT_FILE, Config
from canaryd.http import HttpServer, Pages
from canaryd.logs import event_logger
from canaryd.metrics.collector import make_registry
from canaryd.status import finding_list
from canaryd.supervisor.supervisor import Supervisor

log = event_logger(__name__)


def serve(config: Config, *, source: str) -> None:
    """Run the daemon until SIGTERM or SIGINT; a second signal ends it without waiting for its workers.

    Raises:
        StartError: directories or sockets cannot be used.
        PortBusy: the HTTP address is taken.
    """
    supervisor = Supervisor(config, source=source)

    def findings() -> str:
        with supervisor.lock:
            return json.dumps([each.model_dump() for each in finding_list(supervisor)])

    try:
        server = HttpServer(
            config.http,
            Pages(
                registry=make_registry(supervisor.metrics),
                turning=supervisor.is_turning,
                unready=supervisor.not_ready,
                status=lambda: supervisor.status().model_dump_json(),
                findings=findings,
                slot=supervisor.explain,
            ),
        )
    except BaseException:
        supervisor.close()
        raise

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        supervisor.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    port_file = config.state_dir / PORT_FILE
    _write_atomically(str(port_file), f"{server.port}\n")
    server.start()
    log.info("serving", version=__version__, http=f"{config.http.host}:{server.port}", config=source)
    try:
        supervisor.run()
    finally:
        server.close()
        port_file.unlink(missing_ok=True)


def _write_atomically(path: str, text: str) -> None:
    with open(f"{path}.new", "w", encoding="ascii") as file:
        file.write(text)
    os.replace(f"{path}.new", path)

"""The HTTP server: read-only pages, a bounded number of connections at a time, on the standard library alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from canaryd import __version__
from canaryd.config import HttpConfig
from canaryd.errors import CanarydError
from canaryd.logs import event_logger

log = event_logger(__name__)

SLOT_SECONDS = 1.0
_MAX_TARGET = 4096
_MAX_SLOT = 1 << 40
_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_JSON = "application/json"

_LANDING = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>canaryd</title></head>
<body><h1>canaryd {version}</h1>
<p>KV-cache corruption detector.</p>
<ul>
<li><a href="/metrics">/metrics</a>: for Prometheus</li>
<li><a href="/status">/status</a>: everything at once, JSON</li>
<li><a href="/findings">/findings</a>: open findings, JSON</li>
<li><a href="/healthz">/healthz</a>: whether the main loop turns</li>
<li><a href="/readyz">/readyz</a>: whether engines can attach</li>
<li>/slot?engine=NAME&amp;group=NAME&amp;slot=NUMBER: what is known of one slot, JSON</li>
</ul></body></html>
"""


class PortBusy(CanarydError):
    """The address cannot be listened on; the message names it and the remedy."""

    reason = "port_busy"


class NoAnswer(Exception):
    """A page that cannot be answered, with the HTTP status that says so."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Pages:
    """What the server shows. Each is called on a server thread.

    `unready` gives reasons, empty if ready; `status` and `findings` give JSON documents; `slot(engine, group, number,
    timeout)` gives one too, or raises NoAnswer.
    """

    registry: CollectorRegistry
    turning: Callable[[], bool]
    unready: Callable[[], list[str]]
    status: Callable[[], str]
    findings: Callable[[], str]
    slot: Callable[[str, str, int, float], dict[str, Any]]


class HttpServer:
    """Listens at once, and serves from `start` on, on threads of its own.

    Raises PortBusy if the address cannot be listened on.
    """

    def __init__(self, config: HttpConfig, pages: Pages) -> None:
        handler = type("_BoundHandler", (_Handler,), {"pages": pages, "timeout": config.timeout})
        try:
            self._server = _Server(config, handler)
        except (OSError, OverflowError) as error:
            raise PortBusy(
                f"cannot listen on {config.host}:{config.port}: {getattr(error, 'strerror', None) or error}; "
                "stop what listens there, or set http.host and http.port (CANARYD_HTTP__PORT)."
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port that was really bound."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop; requests in flight end by their timeouts."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, config: HttpConfig, handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in config.host:
            self.address_family = AF_INET6
        self._slots = threading.BoundedSemaphore(config.max_connections)
        super().__init__((config.host, config.port), handler)

    def server_bind(self) -> None:
        # without it the port stays busy for a minute after a restart, for the sake of connections that are long over
        self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        # the base class looks up the host's name, which may take seconds without a name server
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            _refuse(request)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("an HTTP request failed", client=client_address[0])


def _refuse(request: socket) -> None:
    try:
        request.settimeout(0.1)
        request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    except OSError as error:
        log.debug("a refused HTTP client is gone", error=str(error))


class _Handler(BaseHTTPRequestHandler):
    pages: Pages
    protocol_version = "HTTP/1.1"
    server_version = f"canaryd/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def _serve(self, *, body: bool) -> None:
        self.close_connection = True
        try:
            status, kind, content = self._page()
        except NoAnswer as problem:
            status, kind, content = problem.status, _TEXT, f"{problem}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _page(self) -> tuple[int, str, bytes]:
        if len(self.path) > _MAX_TARGET:
            raise NoAnswer(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
        target = urlsplit(self.path)
        pages: dict[str, Callable[[], tuple[str, bytes]]] = {
            "/": lambda: (_HTML, _LANDING.format(version=__version__).encode()),
            "/metrics": self._metrics,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/status": lambda: (_JSON, self.pages.status().encode()),
            "/findings": lambda: (_JSON, self.pages.findings().encode()),
            "/slot": lambda: (_JSON, self._slot(target.query)),
        }
        page = pages.get(target.path)
        if page is None:
            raise NoAnswer(HTTPStatus.NOT_FOUND, f"there is no page {target.path[:200]!r}; see /")
        kind, content = page()
        return HTTPStatus.OK, kind, content

    def _metrics(self) -> tuple[str, bytes]:
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        return kind, encode(self.pages.registry)

    def _health(self) -> tuple[str, bytes]:
        if not self.pages.turning():
            raise NoAnswer(HTTPStatus.SERVICE_UNAVAILABLE, "the main loop is stuck")
        return _TEXT, b"ok\n"

    def _readiness(self) -> tuple[str, bytes]:
        unready = self.pages.unready()
        if unready:
            raise NoAnswer(HTTPStatus.SERVICE_UNAVAILABLE, "; ".join(unready))
        return _TEXT, b"ready\n"

    def _slot(self, query: str) -> bytes:
        try:
            given = parse_qs(query, keep_blank_values=True, strict_parsing=True, max_num_fields=8)
        except ValueError as error:
            raise NoAnswer(400, f"the query cannot be read: {error}; see /") from error
        unknown = sorted(set(given) - {"engine", "group", "slot"})
        if unknown or any(len(values) != 1 for values in given.values()) or len(given) != 3:
            raise NoAnswer(400, "ask with engine, group and slot, each once: /slot?engine=NAME&group=NAME&slot=NUMBER")
        text = given["slot"][0]
        if not (text.isascii() and text.isdigit() and int(text[:16]) < _MAX_SLOT and len(text) < 16):
            raise NoAnswer(400, f"slot must be a whole number from 0 on, got {text[:50]!r}")
        return json.dumps(self.pages.slot(given["engine"][0], given["group"][0], int(text), SLOT_SECONDS)).encode()

    def log_message(self, format: str, *args: object) -> None:
        log.debug("http", line=format % args)

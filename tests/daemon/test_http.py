"""The HTTP server's pages, and what it does with requests that are wrong, slow or too many."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from canaryd.config import HttpConfig
from canaryd.http import HttpServer, NoAnswer, Pages, PortBusy
from daemon.harness import wait_for


class State:
    """What the stub pages show."""

    def __init__(self) -> None:
        self.turning = True
        self.unready: list[str] = []
        self.asked: list[tuple[str, str, int]] = []

    def slot(self, engine: str, group: str, number: int, timeout: float) -> dict[str, Any]:
        self.asked.append((engine, group, number))
        if engine != "e":
            raise NoAnswer(404, f"no engine {engine!r} is attached")
        return {"slot": number}


def pages(state: State) -> Pages:
    registry = CollectorRegistry()
    Gauge("canaryd_test", "A test.", registry=registry).set(4)
    return Pages(
        registry=registry,
        turning=lambda: state.turning,
        unready=lambda: state.unready,
        status=lambda: '{"status_version": 1}',
        findings=lambda: "[]",
        slot=state.slot,
    )


@pytest.fixture
def state() -> State:
    return State()


@pytest.fixture
def server(state: State) -> Iterator[HttpServer]:
    made = HttpServer(HttpConfig(port=0, timeout=0.5, max_connections=2), pages(state))
    made.start()
    yield made
    made.close()


def ask(server: HttpServer, text: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of a raw request."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(text.encode())
        data = b""
        while piece := connection.recv(65536):
            data += piece
    head, _, body = data.decode().partition("\r\n\r\n")
    first, *rest = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in rest), body


def get(server: HttpServer, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return ask(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n")


def test_metrics_speak_both_formats(server: HttpServer) -> None:
    code, headers, body = get(server, "/metrics")
    assert (code, "canaryd_test 4.0" in body) == (200, True)
    assert headers["Content-Type"].startswith("text/plain")
    _code, headers, body = get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


def test_the_landing_page_links_the_others(server: HttpServer) -> None:
    code, headers, body = get(server, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    for page in ("/metrics", "/status", "/findings", "/healthz", "/readyz"):
        assert f'href="{page}"' in body
        assert get(server, page)[0] == 200


def test_health_and_readiness_say_why_not(server: HttpServer, state: State) -> None:
    assert get(server, "/healthz")[0] == 200
    state.turning = False
    assert get(server, "/healthz")[::2] == (503, "the main loop is stuck\n")
    assert get(server, "/readyz")[::2] == (200, "ready\n")
    state.unready = ["worker host is starting"]
    assert get(server, "/readyz")[::2] == (503, "worker host is starting\n")


def test_json_pages(server: HttpServer) -> None:
    code, headers, body = get(server, "/status")
    assert (code, headers["Content-Type"], json.loads(body)) == (200, "application/json", {"status_version": 1})
    assert json.loads(get(server, "/findings")[2]) == []


def test_slot_questions(server: HttpServer, state: State) -> None:
    assert json.loads(get(server, "/slot?engine=e&group=g%20h&slot=7")[2]) == {"slot": 7}
    assert state.asked == [("e", "g h", 7)]
    assert get(server, "/slot?engine=f&group=g&slot=7")[::2] == (404, "no engine 'f' is attached\n")


@pytest.mark.parametrize(
    "query",
    [
        "",
        "?",
        "?engine=e",
        "?engine=e&group=g",
        "?engine=e&group=g&slot=1&slot=2",
        "?engine=e&group=g&slot=1&more=1",
        "?engine=e&group=g&slot=-1",
        "?engine=e&group=g&slot=x",
        "?engine=e&group=g&slot=\u00b2".encode().decode("latin-1"),
        "?engine=e&group=g&slot=9999999999999999999999",
        "?a=1&b=1&c=1&d=1&e=1&f=1&g=1&h=1&i=1",
    ],
)
def test_slot_questions_that_are_none(query: str, server: HttpServer, state: State) -> None:
    code, _headers, body = get(server, f"/slot{query}")
    assert code == 400
    assert body.strip()
    assert state.asked == []


def test_what_is_not_there_or_not_allowed(server: HttpServer) -> None:
    assert get(server, "/nothing")[0] == 404
    assert get(server, "/../etc/passwd")[0] == 404
    assert ask(server, "POST /status HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")[0] == 501
    assert ask(server, "HEAD /status HTTP/1.1\r\nHost: x\r\n\r\n")[2] == ""
    assert get(server, "/" + "x" * 5000)[0] == 414
    assert get(server, "/", Junk="x" * 70000)[0] == 431


def test_too_many_connections_are_refused_and_slow_ones_dropped(server: HttpServer) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(2)]
    for each in held:
        each.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no more
    wait_for("a refusal", lambda: get(server, "/healthz")[0] == 503, patience=5)  # once both are taken
    for each in held:
        assert each.recv(100) == b""  # dropped after the timeout
        each.close()
    assert get(server, "/healthz")[0] == 200


def test_a_busy_port_is_named(server: HttpServer, state: State) -> None:
    with pytest.raises(PortBusy, match=rf"127\.0\.0\.1:{server.port}.*CANARYD_HTTP__PORT"):
        HttpServer(HttpConfig(port=server.port), pages(state))
    with pytest.raises(PortBusy, match="no-such-address"):
        HttpServer(HttpConfig(host="no-such-address.invalid"), pages(state))


def test_a_port_is_free_again_at_once(state: State) -> None:
    first = HttpServer(HttpConfig(port=0), pages(state))
    first.start()
    assert get(first, "/healthz")[0] == 200  # the server hangs up first, so that its end waits in TIME-WAIT
    first.close()
    second = HttpServer(HttpConfig(port=first.port), pages(state))
    second.close()


def test_an_ipv6_address(state: State) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        made = HttpServer(HttpConfig(host="::1", port=0), pages(state))
    except PortBusy as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    made.close()

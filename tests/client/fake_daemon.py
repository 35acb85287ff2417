"""A tiny daemon for client tests: ROUTER and side listener, pumped by the test, no thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import zmq

from canaryd.wire.announce import AnnouncePage
from canaryd.wire.framing import Header, decode_to_daemon, encode
from canaryd.wire.messages import Attach, Attached, Beat, Refused, Resync, ToDaemon, ToEngine, Welcome
from canaryd.wire.side import SideConnection, SideListener, close_fds

PATIENCE_SECONDS = 20.0


class FakeDaemon:
    """Accepts one client after the other; keeps every frame and every connection."""

    def __init__(self, directory: Path, *, refuse: Refused | None = None, side_refuse: Refused | None = None):
        self.refuse = refuse
        self.side_refuse = side_refuse
        self.resync_on_attach = True
        self.frames: list[tuple[Header, ToDaemon]] = []
        self.beats: list[Header] = []
        self.connections: list[SideConnection] = []
        self.sessions: list[bytes] = []
        self.fds: list[int] = []
        self.page: AnnouncePage | None = None
        self.peer_route: bytes | None = None
        self.gone = 0
        self.refusals = 0
        self._listener = SideListener(directory / "side.sock")
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.bind(f"ipc://{directory / 'engine.sock'}")
        self._waiting: list[SideConnection] = []

    def say(self, answer: ToEngine, session: bytes | None = None) -> None:
        assert self.peer_route is not None
        self._router.send_multipart([self.peer_route, *encode(session or self.sessions[-1], 0, answer)])

    def pump(self) -> None:
        connection = self._listener.accept()
        if connection is not None:
            self._waiting.append(connection)
        for waiting in list(self._waiting):
            self._greet(waiting)
        for known in list(self.connections):
            if known.peer_is_gone():
                self.connections.remove(known)
                known.close()
                self.gone += 1
        while self._router.poll(0):
            route, *parts = self._router.recv_multipart()
            self.peer_route = route
            header, message = decode_to_daemon(parts)
            if isinstance(message, Beat):
                self.beats.append(header)
                continue
            self.frames.append((header, message))
            if isinstance(message, Attach):
                if self.refuse is not None:
                    self.refusals += 1
                    self.say(self.refuse, header.session)
                else:
                    self.say(Attached(described_ratio=1.0, scheme="native"), header.session)
                    if self.resync_on_attach:
                        self.say(Resync(cause="attached"), header.session)

    def _greet(self, waiting: SideConnection) -> None:
        try:
            greeting = waiting.receive_hello()
        except ConnectionError:
            self._waiting.remove(waiting)
            waiting.close()
            return
        if greeting is None:
            return
        hello, fds = greeting
        self._waiting.remove(waiting)
        if self.side_refuse is not None:
            self.refusals += 1
            close_fds(fds)
            waiting.answer(self.side_refuse)
            waiting.close()
            return
        close_fds(self.fds)
        if self.page is not None:
            self.page.close()
        self.fds = fds
        self.page = AnnouncePage.from_fd(fds[0])
        self.sessions.append(hello.session)
        self.connections.append(waiting)
        waiting.answer(Welcome())

    def until(self, condition: Callable[[], bool], what: str = "the condition") -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true"
            self.pump()
            time.sleep(0.002)

    def messages(self, kind: type) -> list[ToDaemon]:
        return [message for _, message in self.frames if isinstance(message, kind)]

    def close(self) -> None:
        self._listener.close()
        self._router.close()
        self._context.term()
        for connection in (*self.connections, *self._waiting):
            connection.close()
        close_fds(self.fds)
        self.fds = []
        if self.page is not None:
            self.page.close()
            self.page = None

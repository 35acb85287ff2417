"""One session's connection to the daemon: side connection, then attach, then the stream. No thread of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import zmq

from canaryd.errors import MalformedFrame
from canaryd.wire import limits
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.framing import decode_to_engine, encode
from canaryd.wire.messages import Attach, Attached, Refused, ToDaemon, ToEngine, Welcome
from canaryd.wire.side import SideClient

SIDE_SOCKET = "side.sock"
ENGINE_SOCKET = "engine.sock"


class LinkState(StrEnum):
    """How far the session has come."""

    GREETING = "greeting"
    ATTACHING = "attaching"
    ATTACHED = "attached"


class LinkLost(Exception):
    """The daemon is gone or closed the side connection; the session is over."""


class Link:
    """Connects on construction. Raises OSError if no daemon listens; nothing stays open then.

    Args:
        socket_dir: the daemon's directory of sockets.
        attach: what to attach; host memories already numbered from 1 in the order of `fds`.
        fds: descriptors of host memories, the caller's to close.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket_dir: Path, attach: Attach, fds: Sequence[int]):
        self.session = os.urandom(limits.SESSION_BYTES)
        self.state = LinkState.GREETING
        self._attach = attach
        self.page = AnnouncePage.create()
        try:
            self._side = SideClient(socket_dir / SIDE_SOCKET, self.session, [self.page.fd, *fds])
        except BaseException:
            self.page.close()
            raise
        try:
            self._socket = context.socket(zmq.DEALER)
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.SNDHWM, 1000)
            self._socket.set(zmq.RCVHWM, 1000)
            self._socket.set(zmq.MAXMSGSIZE, limits.MAX_BODY_BYTES)
            self._socket.connect(f"ipc://{socket_dir / ENGINE_SOCKET}")
        except BaseException:
            self._side.close()
            self.page.close()
            raise

    def receive(self) -> list[ToEngine]:
        """What the daemon said since the last call; advances `state`. At most 64 answers at once.

        Raises LinkLost if the daemon is gone, WireError if it speaks nonsense.
        """
        if self.state is LinkState.GREETING:
            return self._greet()
        if self._side.peer_is_gone():
            raise LinkLost("the daemon closed the side connection")
        answers: list[ToEngine] = []
        while len(answers) < 64:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            header, answer = decode_to_engine(parts)
            if header.session != self.session:
                continue  # an answer to a session that is over
            if isinstance(answer, Attached) and self.state is LinkState.ATTACHING:
                self.state = LinkState.ATTACHED
            answers.append(answer)
        return answers

    def _greet(self) -> list[ToEngine]:
        try:
            answer = self._side.receive_answer()
        except ConnectionError as error:
            raise LinkLost("the daemon closed the side connection before it answered") from error
        if isinstance(answer, Refused):
            return [answer]
        if isinstance(answer, Welcome):
            self.state = LinkState.ATTACHING
            if not self.send(0, self._attach):
                raise MalformedFrame("the attach message could not be queued")
        return []

    def send(self, number: int, message: ToDaemon) -> bool:
        """Queue one frame in the socket; False if the socket is full. Raises WireError if it cannot be encoded."""
        try:
            self._socket.send_multipart(encode(self.session, number, message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = 0) -> None:
        """End the session; frames already queued are sent for at most `linger_ms`."""
        self._socket.close(linger=linger_ms)
        self.page.close()

    def hang_up(self) -> None:
        """Close the side connection: the daemon sees the end."""
        self._side.close()

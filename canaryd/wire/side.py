"""The side connection: an AF_UNIX SOCK_SEQPACKET socket beside the message stream.

It carries what a stream of messages cannot: peer credentials, file descriptors, and the peer's death (end of file, in
any PID namespace). The client sends one `Hello` with its descriptors; the daemon answers `Welcome` or `Refused`; then
both keep the connection open and send nothing more.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec

from canaryd.errors import MalformedFrame, OversizedFrame
from canaryd.wire import limits
from canaryd.wire.messages import Hello, SideAnswer
from canaryd.wire.validate import validate

_HELLO = msgspec.msgpack.Decoder(Hello)
_ANSWER = cast("msgspec.msgpack.Decoder[SideAnswer]", msgspec.msgpack.Decoder(SideAnswer))
_CREDENTIALS = struct.Struct("3i")


class PeerCredentials(NamedTuple):
    """Who connected, as the kernel says. `pid` is 0 if the peer is in a PID namespace that is not visible here."""

    pid: int
    uid: int
    gid: int


def close_fds(fds: Sequence[int]) -> None:
    """Close received descriptors; all of them, even if one was closed before."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class SideConnection:
    """The daemon's end of one side connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.peer = PeerCredentials(*_CREDENTIALS.unpack(raw))

    def fileno(self) -> int:
        """For polling: readable means a `Hello` has come, or the engine has died."""
        return self._socket.fileno()

    def receive_hello(self) -> tuple[Hello, list[int]] | None:
        """The client's `Hello` and its descriptors (now the caller's to close), or None if nothing has come yet.

        Raises MalformedFrame or OversizedFrame for anything else, ConnectionError if the peer is gone; no descriptor
        stays open then.
        """
        try:
            data, fds, truncated = _receive(self._socket)
        except BlockingIOError:
            return None
        try:
            if truncated:
                raise OversizedFrame("the hello or its descriptors are longer than the limit")
            try:
                hello = _HELLO.decode(data)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise MalformedFrame(f"the hello does not decode: {error}") from error
            validate(hello)
            if hello.fds != len(fds):
                raise MalformedFrame(f"the hello announces {hello.fds} descriptors, {len(fds)} came")
        except BaseException:
            close_fds(fds)
            raise
        return hello, fds

    def answer(self, answer: SideAnswer) -> None:
        """Send `Welcome` or `Refused`. Raises OSError if the peer is gone."""
        self._socket.send(msgspec.msgpack.encode(answer), socket.MSG_NOSIGNAL)

    def peer_is_gone(self) -> bool:
        """Whether the engine closed the connection or died. A peer that talks after its hello is cut off too."""
        return _has_ended(self._socket)

    def close(self) -> None:
        """Close this end; the client sees end of file."""
        self._socket.close()


class SideListener:
    """The daemon's listening socket at `path`. Raises OSError if it cannot be bound.

    The caller sees to it that the directory is its own and 0700, and that no other daemon listens there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.bind(self._path)
            self._socket.listen(64)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """For polling: readable means a client waits."""
        return self._socket.fileno()

    def accept(self) -> SideConnection | None:
        """The next waiting client, or None."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        try:
            return SideConnection(connection)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Stop listening and remove the socket's file."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class SideClient:
    """The client's end: connects and says hello, non-blocking from then on.

    Raises OSError if no daemon listens, OversizedFrame if there are too many descriptors. `fds` stay the caller's.
    """

    def __init__(self, path: str | os.PathLike[str], session: bytes, fds: Sequence[int]) -> None:
        if len(fds) > limits.MAX_FDS:
            raise OversizedFrame(f"a hello carries at most {limits.MAX_FDS} descriptors, got {len(fds)}")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            # a full backlog gives EAGAIN at once: the caller tries again later and nobody waits
            self._socket.connect(os.fspath(path))
            hello = msgspec.msgpack.encode(Hello(session=session, fds=len(fds)))
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            self._socket.sendmsg([hello], [rights], socket.MSG_NOSIGNAL)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """For polling: readable means an answer has come, or the daemon has died."""
        return self._socket.fileno()

    def receive_answer(self) -> SideAnswer | None:
        """The daemon's answer, or None if it has not come yet.

        Raises ConnectionError if the daemon is gone, MalformedFrame or OversizedFrame if it answers nonsense.
        """
        try:
            try:
                data, fds, truncated = _receive(self._socket)
            except ConnectionResetError:
                # a daemon that refuses without reading the hello resets us; its answer waits behind that error
                data, fds, truncated = _receive(self._socket)
        except BlockingIOError:
            return None
        close_fds(fds)
        if truncated or fds:
            raise OversizedFrame("the daemon's answer is longer than the limit")
        try:
            answer = _ANSWER.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MalformedFrame(f"the daemon's answer does not decode: {error}") from error
        return answer

    def peer_is_gone(self) -> bool:
        """Whether the daemon closed the connection or died."""
        return _has_ended(self._socket)

    def close(self) -> None:
        """Close this end; the daemon sees end of file."""
        self._socket.close()


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """One datagram: data, descriptors, whether any of it was cut off. Raises ConnectionError at end of file."""
    room = socket.CMSG_SPACE(limits.MAX_FDS * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(limits.MAX_SIDE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    if not data:
        close_fds(fds)
        raise ConnectionResetError("the peer closed the side connection")
    return data, fds, bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def _has_ended(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN | select.POLLHUP | select.POLLRDHUP | select.POLLERR)
    return bool(poller.poll(0))

"""The channel between the supervisor and a worker: framed messages and file descriptors over a socket pair.

A frame is `<II` (body length, number of descriptors) and the body. Descriptors travel with the frame's first bytes, so
they have arrived when the frame is complete. Neither end ever blocks: what the peer does not read waits in a buffer
of bounded size.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

_HEADER = struct.Struct("<II")
_READ_BYTES = 1 << 18
_READS_PER_CALL = 64
_MAX_FDS = 200
MAX_BODY_BYTES = 32 << 20
"""Largest body of a frame: an engine's largest frame (16 MiB) and its envelope fit."""


class ChannelClosed(Exception):
    """The peer closed its end, or broke the framing."""


class Channel:
    """One end of a supervisor-worker socket pair.

    Args:
        sock: a connected AF_UNIX stream socket; owned from now on.
        limit_bytes: how much unsent data may wait here before `send` refuses.
    """

    def __init__(self, sock: socket.socket, *, limit_bytes: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._limit = limit_bytes
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._out_bytes = 0
        self._in = bytearray()
        self._in_fds: deque[int] = deque()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether data waits for the peer to read."""
        return bool(self._out)

    def send(self, body: bytes, fds: Sequence[int] = (), *, force: bool = False) -> bool:
        """Queue one frame and send what the socket takes now.

        The descriptors are duplicated: the caller keeps its own. Returns False, and sends nothing, if more than
        `limit_bytes` would wait (never with `force`, which is for small messages that must not be lost).

        Raises:
            ChannelClosed: the peer is gone.
            ValueError: the body or the list of descriptors is too large.
        """
        if len(body) > MAX_BODY_BYTES or len(fds) > _MAX_FDS:
            raise ValueError(f"a frame of {len(body)} bytes and {len(fds)} descriptors is too large")
        if not force and self._out_bytes + len(body) > self._limit:
            return False
        frame = memoryview(_HEADER.pack(len(body), len(fds)) + body)
        self._out.append((frame, tuple(os.dup(fd) for fd in fds)))
        self._out_bytes += len(frame)
        self.flush()
        return True

    def flush(self) -> None:
        """Send what the socket takes without blocking. Raises ChannelClosed if the peer is gone."""
        while self._out:
            data, fds = self._out[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            for fd in fds:
                os.close(fd)
            self._out_bytes -= sent
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], ())

    def receive(self) -> list[tuple[bytes, list[int]]]:
        """The frames that arrived, each with its descriptors, which the caller now owns.

        Raises:
            ChannelClosed: the peer is gone and every frame before its end has been returned by earlier calls.
        """
        closed = False
        for _ in range(_READS_PER_CALL):
            try:
                data, ancillary, _flags, _address = self._sock.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(4 * _MAX_FDS), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError:
                closed = True
                break
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                    self._in_fds.extend(received)
            if not data:
                closed = True
                break
            self._in += data
        frames = self._complete()
        if closed and not frames:
            raise ChannelClosed("the peer closed the channel")
        return frames

    def _complete(self) -> list[tuple[bytes, list[int]]]:
        frames: list[tuple[bytes, list[int]]] = []
        start = 0
        while len(self._in) - start >= _HEADER.size:
            length, count = _HEADER.unpack_from(self._in, start)
            if length > MAX_BODY_BYTES or count > _MAX_FDS:
                raise ChannelClosed("the peer broke the framing")
            end = start + _HEADER.size + length
            if len(self._in) < end:
                break
            if len(self._in_fds) < count:
                raise ChannelClosed("descriptors are missing")
            body = bytes(self._in[start + _HEADER.size : end])
            frames.append((body, [self._in_fds.popleft() for _ in range(count)]))
            start = end
        del self._in[:start]
        return frames

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        for _data, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        while self._in_fds:
            os.close(self._in_fds.popleft())
        self._sock.close()

"""The daemon's directories and sockets, and who may use them."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import zmq

from canaryd.errors import CanarydError
from canaryd.wire import limits
from canaryd.wire.side import SideListener

ENGINE_SOCKET = "engine.sock"
SIDE_SOCKET = "side.sock"
LOCK_FILE = "canaryd.lock"
_HIGH_WATER_MARK = 10_000
_BACKSTOP_BYTES = 4 * limits.MAX_BODY_BYTES
"""ZeroMQ cuts off a peer that sends more; what is between the documented limit and this is answered and counted."""


class StartError(CanarydError):
    """The daemon cannot start here; the message is one sentence with the remedy."""

    reason = "start"


def prepare_socket_dir(path: Path) -> None:
    """Make `path` with mode 0700, or prove that it is private.

    Raises:
        StartError: it cannot be made, is a link or a file, belongs to another user, or lets others in. A handle that
            passes through it is a right to write GPU memory.
    """
    _make(path, "socket_dir")
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StartError(f"socket_dir {path} is not a directory; name another or remove it.")
    if status.st_uid != os.geteuid():
        raise StartError(f"socket_dir {path} belongs to user {status.st_uid}, not to {os.geteuid()}; name another.")
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise StartError(f"socket_dir {path} has mode {mode:04o}, which lets others in; run: chmod 0700 {path}")


def prepare_state_dir(path: Path) -> None:
    """Make `path` with mode 0700 if it is not there. Raises StartError if it cannot be written."""
    _make(path, "state_dir")
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"state_dir {path} cannot be written by user {os.geteuid()}; name another.")


def _make(path: Path, key: str) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"{key} {path} cannot be made: {error.strerror}; name another.") from error


class DirectoryLock:
    """Held as long as the daemon lives: two daemons in one directory would steal each other's engines.

    Raises StartError if another daemon holds it.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise StartError(f"another canaryd uses {key} {folder}; stop it or name another.") from error

    def close(self) -> None:
        """Let the next daemon in."""
        os.close(self._fd)


class EngineSockets:
    """The stream's ROUTER and the side connections' listener. Raises StartError if one cannot be bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self._path = folder / ENGINE_SOCKET
        self._path.unlink(missing_ok=True)
        self.router = context.socket(zmq.ROUTER)
        try:
            self.router.set(zmq.LINGER, 0)
            self.router.set(zmq.MAXMSGSIZE, _BACKSTOP_BYTES)
            self.router.set(zmq.RCVHWM, _HIGH_WATER_MARK)
            self.router.set(zmq.SNDHWM, _HIGH_WATER_MARK)
            self.router.bind(f"ipc://{self._path}")
            self.side = SideListener(folder / SIDE_SOCKET)
        except (zmq.ZMQError, OSError) as error:
            self.router.close()
            raise StartError(f"the sockets in {folder} cannot be bound: {error}") from error

    def close(self) -> None:
        """Stop listening and remove the files."""
        self.router.close()
        self.side.close()
        self._path.unlink(missing_ok=True)

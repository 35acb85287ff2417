"""Acknowledgements on their way to the daemon: a mailbox in `state_dir` that also takes them while no daemon runs.

Each is one JSON line. Writer and reader hold a lock on the file; the daemon journals what it read before it empties the
mailbox, so that a crash in between repeats an acknowledgement instead of losing it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from canaryd.logs import event_logger

log = event_logger(__name__)

FILE_NAME = "acks.jsonl"
_MAX_BYTES = 16 << 20
MAX_NOTE = 2000


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """Someone has seen a finding and takes it on. `time` is Unix seconds."""

    id: str
    by: str
    time: float
    note: str = ""


def post(folder: Path, acks: Iterable[Ack]) -> None:
    """Put acknowledgements into the mailbox, durably. Raises OSError if that is not possible."""
    with _locked(folder / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as fd:
        if os.geteuid() == 0:
            owner = folder.stat()
            os.fchown(fd, owner.st_uid, owner.st_gid)  # the daemon must be able to read it
        # The line feed in front ends a line that a full disk has torn.
        data = b"".join(b"\n" + msgspec.json.encode(each) + b"\n" for each in acks)
        if os.write(fd, data) < len(data):
            raise OSError(28, "no space left on device")
        os.fsync(fd)


def peek(folder: Path) -> list[Ack]:
    """What lies in the mailbox. Raises OSError if it cannot be read."""
    try:
        with _locked(folder / FILE_NAME, os.O_RDONLY, fcntl.LOCK_SH) as fd:
            return _parse(os.read(fd, _MAX_BYTES))
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[list[Ack]]:
    """What lies in the mailbox, which is empty once the block has ended without an error. Never waits: a writer that
    holds the lock is met next time. Raises OSError."""
    try:
        if (folder / FILE_NAME).stat().st_size == 0:
            raise FileNotFoundError
        lock = _locked(folder / FILE_NAME, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with lock as fd:
            yield _parse(os.read(fd, _MAX_BYTES))
            os.ftruncate(fd, 0)
    except (FileNotFoundError, BlockingIOError):
        yield []


@contextlib.contextmanager
def _locked(path: Path, flags: int, kind: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, kind)
        yield fd
    finally:
        os.close(fd)


def _parse(data: bytes) -> list[Ack]:
    acks = []
    for line in data.splitlines():
        if not line.strip():
            continue
        try:
            acks.append(msgspec.json.decode(line, type=Ack))
        except msgspec.MsgspecError as error:
            log.warning("an acknowledgement cannot be read and is dropped", error=str(error))
    return acks

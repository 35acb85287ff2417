"""Findings that survive restarts: an append-only JSON-lines file, and the set of those that are open.

Each record is one write to a file opened with O_APPEND, followed by fsync. A write that fails (a full disk) loses
nothing: the record waits in memory, is retried, and the failure is counted. A torn last line, left by a crash or a full
disk, is skipped when the file is read and cut off from the next record by a line feed.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from canaryd.logs import event_logger

log = event_logger(__name__)

FILE_NAME = "findings.jsonl"
_VERSION = 1
_MAX_LINE_BYTES = 1 << 20
_MAX_PENDING = 10_000


class OpenFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One confirmed corruption.

    `opened` is Unix time in seconds; `process` identifies the engine's process, so that a finding ends with the memory
    that it speaks of (empty: unknown); `detail` is what the core said: check, group, slot, bits, class, owner.
    """

    id: str
    engine: str
    gpu_uuid: str
    check: str
    opened: float
    process: str
    detail: dict[str, Any]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. `kept` repeats an open finding at the start of a new file."""

    version: int
    record: Literal["opened", "kept", "closed"]
    time: float
    id: str
    cause: str | None = None
    finding: OpenFinding | None = None


class FindingsFile:
    """The journal and the open findings that it implies.

    Args:
        folder: where `findings.jsonl` lives; must exist.
        file_bytes: size at which the file is rotated to `findings.jsonl.1` and so on.
        files: rotated files that are kept.
        max_open: open findings kept one by one; more are counted only.
        now: Unix time in seconds.
    """

    def __init__(
        self, folder: Path, *, file_bytes: int, files: int, max_open: int, now: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._file_bytes = file_bytes
        self._files = files
        self._max_open = max_open
        self._now = now
        self._boot = secrets.token_hex(4)
        self._count = 0
        self._open: dict[str, OpenFinding] = {}
        self._overflow: Counter[tuple[str, str, str]] = Counter()
        self._pending: deque[bytes] = deque()
        self._fd: int | None = None
        self._torn = False
        self._carried_bytes = 0
        self.write_failures = 0
        """Failed writes since the start."""
        self.unreadable_lines = 0
        """Lines that were skipped when the files were read."""
        self.records_lost = 0
        """Records dropped because too many waited for the disk."""
        self._load()

    # --- what is open -----------------------------------------------------------------------------------------------

    @property
    def open(self) -> tuple[OpenFinding, ...]:
        """The open findings, oldest first."""
        return tuple(self._open.values())

    @property
    def waiting(self) -> int:
        """Records that are not on the disk yet."""
        return len(self._pending)

    def open_counts(self) -> Counter[tuple[str, str, str]]:
        """Number of open findings by (engine, gpu_uuid, check), those beyond `max_open` included."""
        counts = Counter((each.engine, each.gpu_uuid, each.check) for each in self._open.values())
        return counts + self._overflow

    # --- events -----------------------------------------------------------------------------------------------------

    def record_opened(self, found: Iterable[tuple[str, str, str, str, dict[str, Any]]]) -> list[OpenFinding]:
        """Add findings given as (engine, gpu_uuid, check, process, detail); returns them with their new ids."""
        added = []
        for engine, gpu_uuid, check, process, detail in found:
            self._count += 1
            finding = OpenFinding(
                id=f"{self._boot}-{self._count:06d}",
                engine=engine,
                gpu_uuid=gpu_uuid,
                check=check,
                opened=self._now(),
                process=process,
                detail=detail,
            )
            added.append(finding)
            if len(self._open) < self._max_open:
                self._open[finding.id] = finding
            else:
                self._overflow[engine, gpu_uuid, check] += 1
            self._queue(_Record(version=_VERSION, record="opened", time=finding.opened, id=finding.id, finding=finding))
        self.flush()
        return added

    def close_where(self, predicate: Callable[[OpenFinding], bool], *, cause: str) -> int:
        """Close every open finding for which `predicate` holds; returns how many."""
        closing = [each for each in self._open.values() if predicate(each)]
        for finding in closing:
            del self._open[finding.id]
            self._queue(_Record(version=_VERSION, record="closed", time=self._now(), id=finding.id, cause=cause))
        labels = {(each.engine, each.gpu_uuid) for each in closing}
        for key in [key for key in self._overflow if key[:2] in labels]:
            # Those beyond the limit carry no process; they end with the first of their engine that is closed.
            del self._overflow[key]
        self.flush()
        return len(closing)

    def flush(self) -> bool:
        """Write what waits. Returns False if the disk refused; call again later."""
        if not self._pending:
            return True
        try:
            self._rotate_if_large()
            while self._pending:
                self._write(self._pending[0])
                self._pending.popleft()
            if self._fd is not None:
                os.fsync(self._fd)
        except OSError as error:
            self.write_failures += 1
            log.error("findings are not written, kept in memory", error=error.strerror, waiting=len(self._pending))
            return False
        return True

    def close(self) -> None:
        """Try once more to write what waits, and close the file."""
        self.flush()
        self._close()

    # --- the file ---------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._folder / (FILE_NAME if number == 0 else f"{FILE_NAME}.{number}")

    def _queue(self, record: _Record) -> None:
        if len(self._pending) >= _MAX_PENDING:
            self._pending.popleft()
            self.records_lost += 1
        self._pending.append(msgspec.json.encode(record) + b"\n")

    def _descriptor(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path(0), flags, 0o600)
            os.fchmod(self._fd, 0o600)
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = os.write(self._descriptor(), data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(28, "short write: no space left on device")

    def _rotate_if_large(self) -> None:
        if os.fstat(self._descriptor()).st_size - self._carried_bytes < self._file_bytes:
            return
        self._close()
        self._path(self._files).unlink(missing_ok=True)
        for number in range(self._files - 1, -1, -1):
            if self._path(number).exists():
                self._path(number).rename(self._path(number + 1))
        self._torn = False
        # What is still open must be found in the newest file: the older ones will be deleted.
        waiting = {msgspec.json.decode(line)["id"] for line in self._pending}
        for finding in self._open.values():
            if finding.id not in waiting:
                self._write(msgspec.json.encode(self._kept(finding)) + b"\n")
        self._carried_bytes = os.fstat(self._descriptor()).st_size

    def _kept(self, finding: OpenFinding) -> _Record:
        return _Record(version=_VERSION, record="kept", time=self._now(), id=finding.id, finding=finding)

    def _load(self) -> None:
        decoder = msgspec.json.Decoder(_Record)
        for number in range(self._files, -1, -1):
            path = self._path(number)
            if not path.exists():
                continue
            line = b""
            with path.open("rb") as file:
                while line := file.readline(_MAX_LINE_BYTES):
                    self._replay(decoder, line, path)
                    ended = line.endswith(b"\n")
            self._torn = number == 0 and path.stat().st_size > 0 and not ended
        for finding in list(self._open.values())[self._max_open :]:
            del self._open[finding.id]
            self._overflow[finding.engine, finding.gpu_uuid, finding.check] += 1
        if self._open:
            log.warning("open findings of an earlier run", count=len(self._open))

    def _replay(self, decoder: msgspec.json.Decoder[_Record], line: bytes, path: Path) -> None:
        if not line.strip():
            return
        try:
            record = decoder.decode(line)
        except msgspec.MsgspecError as error:
            self.unreadable_lines += 1
            log.warning("unreadable line skipped", file=path.name, error=str(error))
            return
        if record.record == "closed":
            self._open.pop(record.id, None)
        elif record.finding is not None:
            self._open[record.id] = record.finding

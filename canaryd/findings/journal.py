"""Findings that survive restarts: an append-only JSON-lines file, and the set of those that are open.

Each record is one write to a file opened with O_APPEND, followed by fsync, and holds the whole finding as it then
stands. A write that fails (a full disk) loses nothing: the record waits in memory, is retried, and the failure is
counted. A torn last line, left by a crash or a full disk, is skipped when the file is read and cut off from the next
record by a line feed.
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

from canaryd.findings.acks import Ack
from canaryd.findings.finding import Finding, Hardware, base_name
from canaryd.findings.verdict import judge
from canaryd.logs import event_logger

log = event_logger(__name__)

FILE_NAME = "findings.jsonl"
INCIDENT_SECONDS = 30.0
"""Findings of several ranks that come within this time, of one check, are one incident."""
_VERSION = 1
_MAX_LINE_BYTES = 1 << 20
_MAX_PENDING = 10_000

Found = tuple[str, str, str, str, dict[str, Any]]
"""Engine, gpu_uuid, check, process, detail."""
Kind = Literal["opened", "kept", "seen", "joined", "updated", "acknowledged", "closed"]


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. `kept` repeats an open finding at the start of a new file; `detail` is what was joined."""

    version: int
    record: Kind
    time: float
    id: str
    cause: str | None = None
    finding: Finding | None = None
    detail: dict[str, Any] | None = None


class FindingsFile:
    """The journal and the open findings that it implies.

    Args:
        folder: where `findings.jsonl` lives; must exist.
        file_bytes: size at which the file is rotated to `findings.jsonl.1` and so on.
        files: rotated files that are kept.
        max_open: open findings kept one by one, at most half of them of one engine and check, so that no flood hides
            another check's places; more are joined to the last of their engine and check.
        now: Unix time in seconds.
    """

    def __init__(
        self, folder: Path, *, file_bytes: int, files: int, max_open: int, now: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self._file_bytes = file_bytes
        self._files = files
        self._max_open = max_open
        self._now = now
        self._boot = secrets.token_hex(4)
        self._count = 0
        self._open: dict[str, Finding] = {}
        self._places: dict[tuple[str, ...], str] = {}
        self._kinds: Counter[tuple[str, str, str]] = Counter()
        self._pending: deque[bytes] = deque()
        self._fd: int | None = None
        self._carried_bytes = 0
        self.write_failures = 0
        """Failed writes since the start."""
        self.unreadable_lines = 0
        """Lines that were skipped when the files were read."""
        self.records_lost = 0
        """Records dropped because too many waited for the disk."""
        found, self.unreadable_lines, self._torn = _replay(folder, files)
        for finding in found.values():
            if finding.state == "open":
                self._keep(finding)
        if self._open:
            log.warning("open findings of an earlier run", count=len(self._open))

    # --- what is open -----------------------------------------------------------------------------------------------

    @property
    def open(self) -> tuple[Finding, ...]:
        """The open findings, oldest first."""
        return tuple(self._open.values())

    @property
    def waiting(self) -> int:
        """Records that are not on the disk yet."""
        return len(self._pending)

    def open_counts(self) -> Counter[tuple[str, str, str]]:
        """Number of open findings by (engine, gpu_uuid, check)."""
        return +self._kinds

    # --- events -----------------------------------------------------------------------------------------------------

    def record_opened(self, found: Iterable[Found]) -> list[Finding]:
        """Add what was found; returns the findings that are new or were raised, as they now stand."""
        touched = [self._add(*each) for each in found]
        self.flush()
        return touched

    def _add(self, engine: str, gpu_uuid: str, check: str, process: str, detail: dict[str, Any]) -> Finding:
        now = self._now()
        self._count += 1
        finding = Finding(
            id=f"{self._boot}-{self._count:06d}",
            engine=engine,
            gpu_uuid=gpu_uuid,
            check=check,
            opened=now,
            last_seen=now,
            process=process,
            detail=detail,
        )
        before = self._open.get(self._places.get(finding.place, ""))
        if before is not None:
            again = msgspec.structs.replace(
                before, last_seen=now, count=before.count + 1, detail=detail, standing="unknown"
            )
            return self._put("seen", self._judged(again))
        full = len(self._open) >= self._max_open or self._kinds[_kind(finding)] >= max(1, self._max_open // 2)
        if full and (host := self._host(finding)) is not None:
            return self._put("joined", msgspec.structs.replace(host, last_seen=now, joined=host.joined + 1), detail)
        siblings = self._siblings(finding)
        finding = msgspec.structs.replace(finding, incident=siblings[0].incident if siblings else finding.id)
        self._put("opened", self._judged(finding))
        for sibling in siblings:
            # another rank changes what is likely for the ranks before it
            judged = self._judged(self._open[sibling.id])
            if judged != sibling:
                self._put("updated", judged)
        return self._open[finding.id]

    def _host(self, finding: Finding) -> Finding | None:
        alike = (each for each in reversed(self._open.values()) if _kind(each) == _kind(finding))
        return next(alike, None)

    def _siblings(self, finding: Finding) -> list[Finding]:
        """Findings of this incident by other ranks of the engine."""
        name = base_name(finding.engine)
        return [
            each
            for each in self._open.values()
            if each.engine != finding.engine
            and base_name(each.engine) == name
            and each.check == finding.check
            and abs(each.last_seen - finding.opened) <= INCIDENT_SECONDS
        ]

    def _judged(self, finding: Finding) -> Finding:
        ranks = {each.engine for each in self._open.values() if each.incident == finding.incident}
        verdict, why = judge(finding, ranks)
        return msgspec.structs.replace(finding, verdict=verdict, why=why)

    def note_hardware(self, gpu_uuid: str, since: float, hardware: Hardware) -> None:
        """The GPU's counters, as they stood just after findings that were last seen at or after `since`."""
        for finding in list(self._open.values()):
            if finding.gpu_uuid == gpu_uuid and finding.last_seen >= since:
                self._put("updated", self._judged(msgspec.structs.replace(finding, hardware=hardware)))
        self.flush()

    def note_standing(self, identity: str, standing: Literal["there", "overwritten"], readers: int) -> None:
        """Whether the damage of an open finding is still in place, and how many open rows hold its page. Only the end
        of the damage is journalled: readers come and go."""
        finding = self._open.get(identity)
        if finding is None or (finding.standing, finding.readers) == (standing, readers):
            return
        changed = msgspec.structs.replace(finding, standing=standing, readers=readers)
        if finding.standing == standing:
            self._open[identity] = changed
            return
        self._put("updated", changed)
        self.flush()

    def acknowledge(self, acks: Iterable[Ack]) -> list[Finding]:
        """Take open findings off the list, on someone's word; returns them. An id that is not open changes nothing."""
        taken = []
        for ack in acks:
            finding = self._open.get(ack.id)
            if finding is not None:
                taken.append(acknowledged(finding, ack))
                self._put("acknowledged", taken[-1])
        self.flush()
        return taken

    def close_where(self, predicate: Callable[[Finding], bool], *, cause: str) -> int:
        """Close every open finding for which `predicate` holds; returns how many."""
        closing = [each for each in self._open.values() if predicate(each)]
        for finding in closing:
            self._put("closed", msgspec.structs.replace(finding, state="closed", ended=self._now(), cause=cause))
        self.flush()
        return len(closing)

    def _put(self, kind: Kind, finding: Finding, detail: dict[str, Any] | None = None) -> Finding:
        """The finding as it now stands, in memory and on its way to the disk."""
        if finding.state == "open":
            self._keep(finding)
        else:
            del self._open[finding.id]
            self._kinds[_kind(finding)] -= 1
            self._places.pop(finding.place, None)
        record = _Record(
            version=_VERSION,
            record=kind,
            time=self._now(),
            id=finding.id,
            cause=finding.cause or None,
            finding=finding,
            detail=detail,
        )
        if len(self._pending) >= _MAX_PENDING:
            self._pending.popleft()
            self.records_lost += 1
        self._pending.append(msgspec.json.encode(record) + b"\n")
        return finding

    def _keep(self, finding: Finding) -> None:
        if finding.id not in self._open:
            self._kinds[_kind(finding)] += 1
        self._open[finding.id] = finding
        self._places[finding.place] = finding.id

    # --- the file ---------------------------------------------------------------------------------------------------

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

    def _descriptor(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(_path(self.folder, 0), flags, 0o600)
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
        _path(self.folder, self._files).unlink(missing_ok=True)
        for number in range(self._files - 1, -1, -1):
            if _path(self.folder, number).exists():
                _path(self.folder, number).rename(_path(self.folder, number + 1))
        self._torn = False
        # What is still open must be found in the newest file: the older ones will be deleted.
        waiting = {msgspec.json.decode(line)["id"] for line in self._pending}
        for finding in self._open.values():
            if finding.id not in waiting:
                record = _Record(version=_VERSION, record="kept", time=self._now(), id=finding.id, finding=finding)
                self._write(msgspec.json.encode(record) + b"\n")
        self._carried_bytes = os.fstat(self._descriptor()).st_size


def _kind(finding: Finding) -> tuple[str, str, str]:
    return finding.engine, finding.gpu_uuid, finding.check


def acknowledged(finding: Finding, ack: Ack) -> Finding:
    """The finding once someone has taken it on."""
    return msgspec.structs.replace(finding, state="acknowledged", ended=ack.time, by=ack.by, note=ack.note)


def read_findings(folder: Path, files: int) -> list[Finding]:
    """Every finding that the files in `folder` still know, oldest first. Raises OSError if they cannot be read."""
    return list(_replay(folder, files)[0].values())


def _path(folder: Path, number: int) -> Path:
    return folder / (FILE_NAME if number == 0 else f"{FILE_NAME}.{number}")


def _replay(folder: Path, files: int) -> tuple[dict[str, Finding], int, bool]:
    """The last state of each finding by id, the lines that could not be read, and whether the last line is torn."""
    decoder = msgspec.json.Decoder(_Record)
    found: dict[str, Finding] = {}
    unreadable, torn = 0, False
    for number in range(files, -1, -1):
        path = _path(folder, number)
        if not path.exists():
            continue
        torn = False
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE_BYTES):
                torn = not line.endswith(b"\n")
                if not line.strip():
                    continue
                try:
                    record = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    unreadable += 1
                    log.warning("unreadable line skipped", file=path.name, error=str(error))
                    continue
                _apply(found, record)
    return found, unreadable, torn


def _apply(found: dict[str, Finding], record: _Record) -> None:
    if record.finding is not None:
        found[record.id] = record.finding
    elif record.record == "closed" and record.id in found:  # as earlier releases wrote it
        found[record.id] = msgspec.structs.replace(
            found[record.id], state="closed", ended=record.time, cause=record.cause or ""
        )

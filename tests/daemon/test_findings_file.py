"""The findings file: survives restarts, torn lines, rotation and full disks, and loses nothing silently."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from canaryd.findings import FILE_NAME, FindingsFile


def opened(folder: Path, **limits: int) -> FindingsFile:
    limits = {"file_bytes": 1 << 20, "files": 3, "max_open": 100} | limits
    return FindingsFile(folder, now=lambda: 1000.5, **limits)


def found(number: int = 1, check: str = "content", process: str = "p1") -> tuple[str, str, str, str, dict[str, Any]]:
    return "engine", "host", check, process, {"group": "full", "pages": [number]}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE_NAME).read_bytes().splitlines() if line.strip()]


def test_findings_survive_a_restart_with_unique_ids(tmp_path: Path) -> None:
    first = opened(tmp_path)
    added = first.record_opened([found(1), found(2, "chain")])
    first.close()
    second = opened(tmp_path)
    assert second.open == tuple(added)
    more = second.record_opened([found(3)])
    assert len({each.id for each in second.open}) == 3
    assert second.open_counts() == {("engine", "host", "content"): 2, ("engine", "host", "chain"): 1}
    assert second.close_where(lambda each: each.id == more[0].id, cause="test") == 1
    second.close()
    assert [each.id for each in opened(tmp_path).open] == [each.id for each in added]
    assert [line["record"] for line in lines(tmp_path)] == ["opened", "opened", "opened", "closed"]
    assert lines(tmp_path)[-1]["cause"] == "test"


def test_the_file_is_private(tmp_path: Path) -> None:
    opened(tmp_path).record_opened([found()])
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_a_torn_last_line_is_skipped_and_not_joined(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.record_opened([found(1), found(2)])
    first.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-7])
    second = opened(tmp_path)
    assert [each.detail["pages"] for each in second.open] == [[1]]
    assert second.unreadable_lines == 1
    second.record_opened([found(3)])
    second.close()
    assert [each.detail["pages"] for each in opened(tmp_path).open] == [[1], [3]]


@pytest.mark.parametrize("garbage", [b"\0" * 300 + b"\n", b"{}\n", b'{"version":1}\n', b"\xff\xfe\n", b"\n\n"])
def test_garbage_lines_are_skipped(garbage: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(garbage)
    assert opened(tmp_path).open == ()
    assert opened(tmp_path).record_opened([found()])


def test_rotation_is_bounded_and_keeps_what_is_open(tmp_path: Path) -> None:
    file = opened(tmp_path, file_bytes=4096, files=2)
    keep = file.record_opened([found(7)])
    for number in range(200):
        (each,) = file.record_opened([found(number)])
        file.close_where(lambda other, this=each: other.id == this.id, cause="test")  # type: ignore[misc]
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [FILE_NAME, f"{FILE_NAME}.1", f"{FILE_NAME}.2"]
    assert all(path.stat().st_size < 3 * 4096 for path in tmp_path.iterdir())
    assert opened(tmp_path, file_bytes=4096, files=2).open == tuple(keep)


def test_more_than_the_limit_is_counted_and_closed_with_the_rest(tmp_path: Path) -> None:
    file = opened(tmp_path, max_open=2)
    file.record_opened([found(number) for number in range(5)])
    assert len(file.open) == 2
    assert file.open_counts()["engine", "host", "content"] == 5
    file.close()
    again = opened(tmp_path, max_open=2)
    assert again.open_counts()["engine", "host", "content"] == 5
    again.close_where(lambda _each: True, cause="test")
    assert not again.open_counts()


def test_a_full_disk_keeps_findings_in_memory_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path)
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    file.record_opened([found(1), found(2)])
    assert (len(file.open), file.waiting, file.write_failures) == (2, 2, 1)
    assert not file.flush()
    monkeypatch.setattr(os, "write", real)
    assert file.flush()
    assert file.waiting == 0
    file.close()
    assert len(opened(tmp_path).open) == 2


def test_a_short_write_is_torn_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path)
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[: len(data) // 2]))
    file.record_opened([found(1)])
    monkeypatch.setattr(os, "write", real)
    assert file.waiting == 1
    assert file.flush()
    file.close()
    again = opened(tmp_path)
    assert [each.detail["pages"] for each in again.open] == [[1]]
    assert again.unreadable_lines == 1


def test_a_folder_that_vanished_is_survived(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    file = opened(folder)
    folder.rmdir()
    file.record_opened([found()])
    assert (file.waiting, file.write_failures) == (1, 1)

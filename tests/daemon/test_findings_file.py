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
from canaryd.findings.acks import FILE_NAME as MAILBOX
from canaryd.findings.acks import Ack, peek, post, taken
from canaryd.findings.finding import Hardware
from canaryd.findings.journal import read_findings


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
        (each,) = file.record_opened([found(10 + number)])
        file.close_where(lambda other, this=each: other.id == this.id, cause="test")  # type: ignore[misc]
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [FILE_NAME, f"{FILE_NAME}.1", f"{FILE_NAME}.2"]
    assert all(path.stat().st_size < 3 * 4096 for path in tmp_path.iterdir())
    assert opened(tmp_path, file_bytes=4096, files=2).open == tuple(keep)


def test_more_than_the_limit_joins_the_last_of_its_kind(tmp_path: Path) -> None:
    file = opened(tmp_path, max_open=4)
    file.record_opened([found(number) for number in range(5)])
    assert [each.joined for each in file.open] == [0, 3]  # half of the room is for other checks
    file.record_opened([found(9, "chain")])  # the first of its kind is never hidden
    assert file.open_counts() == {("engine", "host", "content"): 2, ("engine", "host", "chain"): 1}
    assert [line["detail"]["pages"] for line in lines(tmp_path) if line["record"] == "joined"] == [[2], [3], [4]]
    file.close()
    again = opened(tmp_path, max_open=4)
    assert (again.open, again.open_counts()) == (file.open, file.open_counts())
    again.record_opened([found(10, "owner"), found(11, "owner"), found(12, "range"), found(13, "range")])
    assert [each.joined for each in again.open if each.check == "range"] == [1]
    again.close_where(lambda _each: True, cause="test")
    assert not again.open_counts()
    again.close()
    assert not opened(tmp_path, max_open=4).open


def test_a_repeat_raises_the_count_and_opens_nothing(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.record_opened([found(1), found(1), found(2), found(1, process="p2"), found(1, "chain")])
    assert [each.count for each in file.open] == [2, 1, 1, 1]
    file.close()
    assert opened(tmp_path).open == file.open


def test_an_acknowledgement_says_who_when_and_why(tmp_path: Path) -> None:
    file = opened(tmp_path)
    first, second = file.record_opened([found(1), found(2)])
    ack = Ack(id=first.id, by="ann", time=7.0, note="board replaced")
    assert [each.id for each in file.acknowledge([ack, ack, Ack(id="no such", by="x", time=1.0)])] == [first.id]
    assert file.open == (second,)
    (again,) = file.record_opened([found(1)])  # what comes after it is news
    assert again.id != first.id
    file.close()
    known = {each.id: each for each in read_findings(tmp_path, 3)}
    told = known[first.id]
    assert (told.state, told.by, told.ended, told.note) == ("acknowledged", "ann", 7.0, "board replaced")
    assert {each.id for each in opened(tmp_path).open} == {second.id, again.id}


def test_the_mailbox_is_emptied_only_when_its_acknowledgements_are_safe(tmp_path: Path) -> None:
    acks = [Ack(id=str(number), by="ann", time=1.0, note="x\ny") for number in range(3)]
    post(tmp_path, acks[:2])
    with (tmp_path / MAILBOX).open("ab") as mailbox:
        mailbox.write(b'{"id": "torn')
    post(tmp_path, acks[2:])
    assert peek(tmp_path) == acks
    with pytest.raises(RuntimeError), taken(tmp_path):
        raise RuntimeError
    with taken(tmp_path) as seen:
        assert seen == acks
        with taken(tmp_path) as meanwhile:  # somebody holds the lock: nobody waits
            assert meanwhile == []
    assert peek(tmp_path) == []
    assert stat.S_IMODE((tmp_path / MAILBOX).stat().st_mode) == 0o600


def test_standing_and_hardware_are_kept(tmp_path: Path) -> None:
    file = opened(tmp_path)
    (one,) = file.record_opened([found(1)])
    file.note_standing(one.id, "there", 2)
    file.note_standing(one.id, "there", 0)
    assert [(each.standing, each.readers) for each in file.open] == [("there", 0)]
    file.note_standing(one.id, "overwritten", 0)
    file.note_hardware("host", since=1000.5, hardware=Hardware(time=1.0, xids=(94,)))
    file.note_hardware("host", since=2000.0, hardware=Hardware(time=2.0))  # it was seen before that
    (kept,) = opened(tmp_path).open
    assert (kept.standing, kept.verdict, kept.hardware) == (
        "overwritten",
        "hardware likely",
        Hardware(time=1.0, xids=(94,)),
    )


def test_findings_of_several_ranks_are_one_incident(tmp_path: Path) -> None:
    file = opened(tmp_path)
    ranks = ["llm", "llm:tp1", "other"]
    file.record_opened([(rank, "host", "content", rank, {"pages": [1]}) for rank in ranks])
    first, second, other = file.open
    assert first.incident == second.incident == first.id
    assert other.incident == other.id
    assert (first.verdict, second.verdict, other.verdict) == ("software likely", "software likely", "unknown")


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

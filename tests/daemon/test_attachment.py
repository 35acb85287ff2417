"""One attachment in this process: what it maps, the order in which it reads and judges, and what it lets go of."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from canaryd.client.facts import Final, end_message
from canaryd.control.messages import HOST, WorkerSettings
from canaryd.errors import AttachRefused, BackendError, RefusalReason
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.messages import (
    Attach,
    Beat,
    Begin,
    End,
    GroupSpec,
    HostShmMemory,
    Identity,
    RegionSpec,
    Snapshot,
)
from canaryd.worker.attachment import TAIL_GAP_SECONDS, Attachment

PAGES, PAGE_SIZE, SLOT_BYTES = 5, 3, 20
SIZE = PAGES * PAGE_SIZE * SLOT_BYTES


class Bench:
    """The engine's side of one attachment, and its worker's side with a clock that we set."""

    def __init__(self, seed: int, name: str, **attach: Any) -> None:
        self.pool = os.memfd_create(name)
        os.write(self.pool, random.Random(seed).randbytes(SIZE))
        self.page = AnnouncePage.create()
        self.fds = [self.page.fd, self.pool]
        self.seq = 0
        self.now = 50.0
        self.compiling = 0
        self.launches: dict[str, int] = {}
        region = RegionSpec(
            name="r",
            memory=0,
            offset=0,
            page_stride=PAGE_SIZE * SLOT_BYTES,
            slot_stride=SLOT_BYTES,
            piece_bytes=SLOT_BYTES,
        )
        group = GroupSpec(name="g", num_pages=PAGES, page_size=PAGE_SIZE, regions=[region])
        self.attach = Attach(
            **{
                "identity": Identity(engine="e"),
                "engine_kind": "test",
                "engine_version": "1",
                "client_version": "1",
                "memories": [HostShmMemory(fd_index=1, offset=0, size=SIZE)],
                "groups": [group],
            }
            | attach
        )

    def open(self, **settings: Any) -> Attachment:
        given: dict[str, Any] = {
            "device": HOST,
            "backend": None,
            "scheme": "native",
            "nice": 0,
            "tick": 0.1,
            "busy_share": 1.0,
            "max_age_live": 1.0,
            "max_age_idle": 1.0,
            "bytes_per_burst": 1 << 20,
            "selftest_interval": 60.0,
            "log_format": "text",
            "log_level": "info",
        }
        self.attachment = Attachment(
            self.attach, self.fds, WorkerSettings(**given | settings), self._count, self._before_compiling
        )
        return self.attachment

    def _count(self, launches: dict[str, int]) -> None:
        self.launches = launches

    def _before_compiling(self) -> None:
        self.compiling += 1

    def say(self, message: Begin | End | Snapshot) -> None:
        self.seq += 1
        self.page.raise_to(self.seq)
        self.attachment.apply(self.seq, message, self.now)

    def write(self, slots: int) -> None:
        """A snapshot, and an op that writes a row over the first `slots` slots."""
        self.say(Snapshot(open_ops=[], rows=[], cached=[]))
        self.say(Begin(op=1))
        final = Final()
        final.open("row", 0, range(-(-slots // PAGE_SIZE)), 0, ids=range(slots))
        final.write(0, ["row"], [slots], range(slots), range(slots), range(slots))
        self.say(end_message(1, "done", final.facts))

    def turn(self, seconds: float = 0.1) -> None:
        self.now += seconds
        self.attachment.step(self.now)
        self.attachment.fetch(lambda: self.now)

    def flip(self, slot: int) -> None:
        byte = os.pread(self.pool, 1, slot * SLOT_BYTES)
        os.pwrite(self.pool, bytes([byte[0] ^ 4]), slot * SLOT_BYTES)

    def close(self) -> None:
        os.close(self.pool)
        self.page.close()


@pytest.fixture
def bench(seed: int) -> Iterator[Bench]:
    made = Bench(seed, f"bench-{seed}")
    yield made
    made.close()


def mapped(seed: int) -> bool:
    return f"bench-{seed}" in Path("/proc/self/maps").read_text()


def test_a_fault_is_found_and_located(bench: Bench) -> None:
    attachment = bench.open()
    bench.write(7)
    for _ in range(3):
        bench.turn()
    assert attachment.explain("g", 6, bench.now).guarded
    assert not attachment.explain("g", 7, bench.now).guarded
    bench.flip(4)
    found: list[tuple[str, dict[str, Any]]] = []
    for _ in range(30):
        bench.turn()
        found += attachment.take_findings(lambda moment: moment + 1000)
    ((check, detail),) = found
    assert (check, list(detail["slots"][0]), detail["region"]) == ("content", [4, 4], "r")
    assert (detail["classification"], detail["changed_bits"]) == ("bit_flip", "0x0000000000000004")
    assert 1050 < detail["first_seen"] <= detail["confirmed"] < 1060
    assert bench.launches
    attachment.close()


def overwritten(bench: Bench, slot: int, content: bytes) -> dict[str, Any]:
    """The one finding after the bytes from `slot` on were overwritten, behind the engine's back."""
    assert bench.attachment is not None
    os.pwrite(bench.pool, content, slot * SLOT_BYTES)
    found: list[tuple[str, dict[str, Any]]] = []
    for _ in range(30):
        bench.turn()
        found += bench.attachment.take_findings(lambda moment: moment)
    ((check, detail),) = found
    assert (check, detail["slots"][0][0]) == ("content", slot)
    return detail


def test_the_class_says_whose_content_it_is(bench: Bench) -> None:
    bench.open()
    bench.write(3 * PAGE_SIZE)
    for _ in range(3):
        bench.turn()
    old = os.pread(bench.pool, SLOT_BYTES, SLOT_BYTES)
    bench.say(Begin(op=2))
    os.pwrite(bench.pool, os.urandom(SLOT_BYTES), SLOT_BYTES)
    final = Final()
    final.write(0, ["row"], [1], [1], [1], [1])
    bench.say(end_message(2, "done", final.facts))
    for _ in range(3):
        bench.turn()
    assert overwritten(bench, 1, old)["classification"] == "stale"
    other = os.pread(bench.pool, SLOT_BYTES, 0)
    detail = overwritten(bench, 2, other)
    assert (detail["classification"], detail["content_of_slot"]) == ("misdirected", 0)
    assert overwritten(bench, 0, os.urandom(SLOT_BYTES))["classification"] == "row"
    assert overwritten(bench, PAGE_SIZE, os.urandom(PAGE_SIZE * SLOT_BYTES))["classification"] == "page"
    assert overwritten(bench, 2 * PAGE_SIZE, bytes(SLOT_BYTES))["classification"] == "zeroed"
    assert bench.attachment is not None
    bench.attachment.close()


def test_the_page_is_read_after_the_work_is_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = bench.open()
    bench.write(7)
    order: list[str] = []
    real_poll, real_read, real_done = attachment._backend.poll, attachment._page.read, attachment.watch.on_burst_done

    def note(name: str, call: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            order.append(name)
            return call(*arguments, **named)

        return noted

    monkeypatch.setattr(attachment._backend, "poll", note("poll", real_poll))
    monkeypatch.setattr(attachment._page, "read", note("read", real_read))
    monkeypatch.setattr(attachment.watch, "on_burst_done", note("judge", real_done))
    bench.turn()
    assert order == ["poll", "read", "judge"]
    attachment.close()


def test_a_lost_tail_is_a_gap(bench: Bench) -> None:
    attachment = bench.open()
    bench.write(7)
    bench.turn()
    attachment.watch.take_resync()
    attachment.apply(bench.seq + 2, Beat(), bench.now)  # two more were announced, and never come
    bench.turn(TAIL_GAP_SECONDS * 0.9)
    assert attachment.watch.counters.gaps == 0
    bench.turn(TAIL_GAP_SECONDS * 0.2)
    assert attachment.watch.counters.gaps == 1
    assert attachment.watch.take_resync()
    bench.turn(TAIL_GAP_SECONDS * 3)
    assert attachment.watch.counters.gaps == 1
    attachment.close()


def test_a_beat_that_is_ahead_of_a_slow_frame_is_no_gap(bench: Bench) -> None:
    attachment = bench.open()
    bench.write(7)
    attachment.apply(bench.seq + 1, Beat(), bench.now)
    bench.turn(TAIL_GAP_SECONDS * 0.9)
    bench.say(Begin(op=2))
    bench.turn(TAIL_GAP_SECONDS * 0.9)
    assert attachment.watch.counters.gaps == 0
    attachment.close()


def test_a_failed_burst_is_lost_and_the_next_one_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attachment = bench.open()
    bench.write(7)

    def fail(_burst: object) -> None:
        raise BackendError("test")

    with monkeypatch.context() as patched:
        patched.setattr(attachment._backend, "start", fail)
        with pytest.raises(BackendError):
            bench.turn()
    assert sum(attachment.watch.counters.stamps_dropped.values()) == 7
    for _ in range(3):
        bench.turn()
    assert attachment.explain("g", 0, bench.now).guarded
    attachment.close()


def test_closing_unmaps(bench: Bench, seed: int) -> None:
    attachment = bench.open()
    bench.write(7)
    bench.turn()
    assert mapped(seed)
    attachment.close()
    assert not mapped(seed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"memories": [HostShmMemory(fd_index=2, offset=0, size=SIZE)]}, RefusalReason.HANDLE_INVALID),
        ({"memories": [HostShmMemory(fd_index=1, offset=0, size=SIZE + 4)]}, RefusalReason.MEMORY_SIZE),
        ({"memories": [HostShmMemory(fd_index=1, offset=0, size=SIZE - 4)]}, RefusalReason.OUT_OF_BOUNDS),
        ({"scheme": "sglang"}, RefusalReason.SCHEME),
    ],
)
def test_refusals_leave_nothing_mapped(change: dict[str, Any], reason: RefusalReason, seed: int) -> None:
    bench = Bench(seed, f"bench-{seed}", **change)
    assert refusal_of(bench) is reason
    assert not mapped(seed)
    bench.close()


def refusal_of(bench: Bench) -> RefusalReason | None:
    try:
        bench.open()
    except AttachRefused as refusal:
        return refusal.refusal
    return None


def test_an_announce_page_that_is_none_is_refused(bench: Bench) -> None:
    bench.fds = [bench.pool, bench.pool]
    assert refusal_of(bench) is RefusalReason.HANDLE_INVALID
    bench.fds = []
    assert refusal_of(bench) is RefusalReason.HANDLE_INVALID


def test_compiling_is_announced_before_the_backend_is_made(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    announced = []

    def make_backend(*_arguments: object, **_options: object) -> object:
        announced.append(bench.compiling)
        raise BackendError("no compiler")

    monkeypatch.setattr("canaryd.worker.attachment.make_backend", make_backend)
    for backend in ("triton", "reference"):
        with pytest.raises(AttachRefused, match="no compiler"):
            bench.open(backend=backend)
    assert announced == [1, 1]


def test_explain_names_what_does_not_exist(bench: Bench) -> None:
    attachment = bench.open()
    with pytest.raises(ValueError, match="no group 'h'; groups: 'g'"):
        attachment.explain("h", 0, bench.now)
    with pytest.raises(ValueError, match=str(PAGES * PAGE_SIZE)):
        attachment.explain("g", PAGES * PAGE_SIZE, bench.now)
    attachment.close()


def test_the_clients_cost_since_the_attachment_is_counted(bench: Bench) -> None:
    attachment = bench.open()
    for elapsed, spent_ms in ((0.0, 7000), (0.6, 7004), (1.2, 7010), (1.3, 7011), (2.4, 7015)):
        attachment.apply(0, Beat(engine_ns=spent_ms * 1_000_000), bench.now + elapsed)
    assert attachment.client_seconds == pytest.approx(0.015)
    attachment.close()

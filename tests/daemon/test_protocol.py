"""Frames and side connections that must not be acted on: each is counted, and answered with its reason."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from canaryd.config import Config
from canaryd.control.messages import Found, Frame, Map, Mapped, NotMapped, Report, Series, Unmapped
from canaryd.errors import AttachRefused, RefusalReason
from canaryd.supervisor.supervisor import Supervisor
from canaryd.wire import limits
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.framing import decode_to_engine, encode
from canaryd.wire.messages import (
    Attach,
    Attached,
    Beat,
    Begin,
    CudaIpcMemory,
    Finding,
    GroupSpec,
    HostShmMemory,
    Identity,
    Refused,
    RegionSpec,
    Rejected,
    Resync,
    ToEngine,
    Welcome,
    WhoAreYou,
)
from canaryd.wire.side import SideClient
from daemon.harness import Folder, wait_for

DETAIL = {"group": "g", "slots": [[2, 3]], "slot_count": 2, "row": "r", "pages": [2, 3]}
GPU = "GPU-00000000-1111-2222-3333-444444444444"


class RecordingWorker:
    """Stands for a worker process: keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.full = False

    def send(self, message: object, fds: object = None, *, force: bool = False) -> bool:
        if self.full and not force:
            return False
        self.sent.append(message)
        return True

    def expect_unmapped(self, session: bytes, now: float) -> None:
        self.sent.append(("expect_unmapped", session))

    def unmapped(self, session: bytes) -> None:
        self.sent.append(("unmapped", session))

    def frames(self) -> list[int]:
        return [each.seq for each in self.sent if isinstance(each, Frame)]


class Peer:
    """A client made of nothing but the wire."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session = os.urandom(16)
        self.side: SideClient | None = None
        self.page = AnnouncePage.create()
        self.dealer = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.set(zmq.LINGER, 0)
        self.dealer.connect(f"ipc://{folder}/engine.sock")

    def greet(self) -> object:
        self.side = SideClient(self.folder / "side.sock", self.session, [self.page.fd])
        return wait_for("an answer", self.side.receive_answer)

    def send(self, *parts: bytes) -> None:
        self.dealer.send_multipart(list(parts))

    def say(self, seq: int, message: Any) -> None:
        self.send(*encode(self.session, seq, message))

    def hear(self) -> ToEngine:
        assert self.dealer.poll(10_000), "no answer"
        return decode_to_engine(self.dealer.recv_multipart())[1]

    def close(self) -> None:
        self.dealer.close()
        if self.side is not None:
            self.side.close()
        self.page.close()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    folder = Folder()
    made = Supervisor(
        Config.model_validate(
            {
                "socket_dir": str(folder.sockets),
                "state_dir": str(folder.state),
                "workers": {"gpus": "off", "host": "off"},
                "engines": {"max_sessions": 3, "stalled_after": 60.0},
            }
        ),
        source="test",
    )
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join()
    folder.remove()


@pytest.fixture
def worker(supervisor: Supervisor) -> RecordingWorker:
    made = RecordingWorker()
    with supervisor.lock:
        supervisor.intake.find_worker = lambda _device, _now: made  # type: ignore[assignment,return-value]
    return made


@pytest.fixture
def peers(supervisor: Supervisor) -> Iterator[list[Peer]]:
    made = [Peer(supervisor.config.socket_dir) for _ in range(4)]
    yield made
    for each in made:
        each.close()


def attach(name: str = "e", tp: int = 0, memories: list[Any] | None = None) -> Attach:
    region = RegionSpec(name="r", memory=0, offset=0, page_stride=16, slot_stride=16, piece_bytes=16)
    return Attach(
        identity=Identity(engine=name, tp=tp),
        engine_kind="test",
        engine_version="1",
        client_version="1",
        memories=memories or [HostShmMemory(fd_index=1, offset=0, size=64)],
        groups=[GroupSpec(name="g", num_pages=4, page_size=1, regions=[region])],
    )


def _given(worker: RecordingWorker, session: bytes) -> bool:
    return any(isinstance(each, Map) and each.session == session for each in worker.sent)


def attached(peer: Peer, supervisor: Supervisor, worker: RecordingWorker, name: str = "e") -> None:
    """Bring a peer to where its frames are forwarded."""
    assert isinstance(peer.greet(), Welcome)
    peer.say(0, attach(name))
    wait_for("the map message", lambda: _given(worker, peer.session))
    mapped = Mapped(session=peer.session, described_ratio=1.0, scheme="native", slots=4, size=64)
    with supervisor.lock:
        supervisor.intake.mapped(mapped)
    assert peer.hear() == Attached(described_ratio=1.0, scheme="native")
    assert peer.hear() == Resync(cause="attached")


def rejected(supervisor: Supervisor, reason: str) -> float:
    return supervisor.metrics().daemon.counters.get(("canaryd_engine_messages_rejected_total", (reason,)), 0)


def refused(supervisor: Supervisor, reason: RefusalReason) -> float:
    return supervisor.metrics().daemon.counters.get(("canaryd_attach_failures_total", (reason.value,)), 0)


def test_frames_that_are_no_frames(supervisor: Supervisor, peers: list[Peer]) -> None:
    peer = peers[0]
    header, body = encode(peer.session, 1, Begin(op=1))
    bad = [
        (b"",),
        (b"x" * 32, body),
        (header[:-1], body),
        (header,),
        (header, body, b""),
        (header, b""),
        (header, body[:-1]),
        (header, b"\xc1" * 50),
        (header, msgspec.msgpack.encode({"kind": "begin", "op": 1, "extra": 2})),
        (header, msgspec.msgpack.encode({"kind": "attached", "described_ratio": 1.0, "scheme": "native"})),
        (header, b"\x81" * 5000),
    ]
    for number, parts in enumerate(bad, 1):
        peer.send(*parts)
        answer = _last_part(peer)
        assert answer["kind"] == "rejected", number
        assert answer["reason"] == "malformed", number
        assert answer["detail"], number
        assert rejected(supervisor, "malformed") == number


def _last_part(peer: Peer) -> Any:
    """An answer, also one to a session that could not be read."""
    assert peer.dealer.poll(10_000), "no answer"
    return msgspec.msgpack.decode(peer.dealer.recv_multipart()[-1])


def test_a_version_that_is_not_spoken(supervisor: Supervisor, peers: list[Peer]) -> None:
    header, body = encode(peers[0].session, 1, Begin(op=1))
    peers[0].send(header[:4] + struct.pack("<H", 9) + header[6:], body)
    answer = _last_part(peers[0])
    assert (answer["reason"], rejected(supervisor, "unknown_version")) == ("unknown_version", 1)
    assert "9" in answer["detail"]


def test_a_frame_that_is_too_large(supervisor: Supervisor, peers: list[Peer]) -> None:
    header, _body = encode(peers[0].session, 1, Begin(op=1))
    peers[0].send(header, b"\xc4" * (limits.MAX_BODY_BYTES + 1))
    assert peers[0].hear().reason == "oversized"  # type: ignore[union-attr]
    assert rejected(supervisor, "oversized") == 1


def test_a_session_that_is_not_known(supervisor: Supervisor, peers: list[Peer]) -> None:
    for message in (Begin(op=1), Beat()):
        peers[0].say(1, message)
        assert peers[0].hear() == WhoAreYou()
    assert rejected(supervisor, "unknown_session") == 2
    assert isinstance(peers[1].greet(), Welcome)
    peers[1].say(1, Begin(op=1))  # greeted, but not attached
    assert peers[1].hear() == WhoAreYou()


def test_out_of_order_frames_are_not_forwarded(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    peer = peers[0]
    attached(peer, supervisor, worker)
    for seq in (1, 2, 5):  # a hole is a gap, which is the core's to see
        peer.say(seq, Begin(op=seq))
    for seq in (5, 3, 1):
        peer.say(seq, Begin(op=9))
        answer = peer.hear()
        assert isinstance(answer, Rejected)
        assert (answer.seq, answer.reason) == (seq, "out_of_order")
    peer.say(4, Beat())
    assert isinstance(peer.hear(), Rejected)
    peer.say(7, Beat())  # names a message that is still queued
    peer.say(6, Begin(op=6))
    wait_for("the last frame", lambda: worker.frames() == [1, 2, 5, 7, 6])
    assert rejected(supervisor, "out_of_order") == 4
    counters = supervisor.metrics().engines[0].counters
    assert counters["canaryd_engine_messages_total", ("begin",)] == 4


def test_a_full_worker_drops_and_counts(supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]) -> None:
    attached(peers[0], supervisor, worker)
    worker.full = True
    peers[0].say(1, Begin(op=1))

    def dropped() -> float:
        return supervisor.metrics().engines[0].counters.get(("canaryd_engine_frames_dropped_total", ()), 0)

    wait_for("the count", lambda: dropped() == 1)
    worker.full = False
    peers[0].say(2, Begin(op=2))
    wait_for("the next frame", lambda: worker.frames() == [2])


def test_an_attachment_waits_for_a_worker_that_is_being_started(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    worker.full = True
    peers[0].greet()
    peers[0].say(0, attach())
    peers[0].say(0, Beat())  # a client beats while it waits
    wait_for("the beat", lambda: _messages(supervisor, "beat") == 1)
    assert supervisor.metrics().engines[0].state == "attaching"
    assert worker.sent == []
    worker.full = False
    wait_for("the map message", lambda: [type(each) for each in worker.sent] == [Map])
    assert not peers[0].dealer.poll(0)


def _messages(supervisor: Supervisor, kind: str) -> float:
    engines = supervisor.metrics().engines
    return engines[0].counters.get(("canaryd_engine_messages_total", (kind,)), 0) if engines else 0


def test_attach_needs_its_side_connection(supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]) -> None:
    peers[0].say(0, attach())
    answer = peers[0].hear()
    assert isinstance(answer, Refused)
    assert (answer.reason, refused(supervisor, RefusalReason.NO_SIDE_CONNECTION)) == ("no_side_connection", 1)
    assert "side.sock" in answer.remedy
    assert not worker.sent


def test_an_identity_is_taken_once_and_free_after_death(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    attached(peers[0], supervisor, worker)
    peers[1].greet()
    peers[1].say(0, attach())
    answer = peers[1].hear()
    assert isinstance(answer, Refused)
    assert answer.reason == "identity_taken"
    assert supervisor.metrics().engines[0].state == "attached"
    assert peers[0].side is not None
    peers[0].side.close()
    wait_for("the end", lambda: supervisor.metrics().engines[0].state == "gone")
    assert ("expect_unmapped", peers[0].session) in worker.sent
    attached(peers[2], supervisor, worker)
    assert [each.prefix for each in supervisor.metrics().engines] == [("e", "host")]


def test_ranks_have_labels_of_their_own(supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]) -> None:
    for peer, rank in zip(peers[:2], (0, 3), strict=True):
        peer.greet()
        peer.say(0, attach(tp=rank))
    wait_for("both", lambda: [each.prefix[0] for each in supervisor.metrics().engines] == ["e", "e:tp3"])


def test_what_no_worker_can_map_is_refused_by_name(supervisor: Supervisor, peers: list[Peer]) -> None:
    gpu = CudaIpcMemory(handle=bytes(64), offset=0, size=64, gpu_uuid=GPU)
    peers[0].greet()
    peers[0].say(0, attach("a", memories=[gpu]))
    answer = peers[0].hear()
    assert isinstance(answer, Refused)
    assert (answer.reason, GPU in answer.cause) == ("gpu_not_visible", True)
    peers[1].greet()
    peers[1].say(0, attach("b", memories=[gpu, HostShmMemory(fd_index=1, offset=0, size=64)]))
    assert peers[1].hear().reason == "memory_kind"  # type: ignore[union-attr]
    states = {each.prefix[0]: each.state for each in supervisor.metrics().engines}
    assert states == {"a": "refused"}
    assert GPU in supervisor.status().engines[0].refusal


def test_what_the_worker_refuses_reaches_the_client(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    peers[0].greet()
    peers[0].say(0, attach())
    wait_for("the map message", lambda: worker.sent)
    refusal = Refused(reason="overlap", cause="Two regions overlap.", remedy="Describe each byte once.")
    with supervisor.lock:
        supervisor.intake.not_mapped(NotMapped(session=peers[0].session, refused=refusal))
    assert peers[0].hear() == refusal
    assert refused(supervisor, RefusalReason.OVERLAP) == 1
    peers[0].say(1, Begin(op=1))
    assert peers[0].hear() == WhoAreYou()


def test_another_user_is_refused(supervisor: Supervisor, peers: list[Peer]) -> None:
    with supervisor.lock:
        supervisor.intake.greeter._uids = frozenset({os.geteuid() + 1})
    answer = peers[0].greet()
    assert isinstance(answer, Refused)
    assert (answer.reason, refused(supervisor, RefusalReason.PEER_CREDENTIALS)) == ("peer_credentials", 1)


def test_the_number_of_sessions_is_bounded(supervisor: Supervisor, peers: list[Peer]) -> None:
    assert all(isinstance(peer.greet(), Welcome) for peer in peers[:3])
    answer = peers[3].greet()
    assert isinstance(answer, Refused)
    assert (answer.reason, "max_sessions" in answer.remedy) == ("limit", True)


def test_a_side_connection_that_talks_nonsense_is_closed(supervisor: Supervisor) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side:
        side.connect(str(supervisor.config.socket_dir / "side.sock"))
        side.send(b"\xc1 nonsense")
        side.settimeout(10)
        assert msgspec.msgpack.decode(side.recv(4096))["reason"] == "malformed"
        assert side.recv(4096) == b""
    assert rejected(supervisor, "malformed") == 1


def test_a_lost_worker_sends_its_clients_away(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    attached(peers[0], supervisor, worker)
    with supervisor.lock:
        supervisor.intake.worker_lost("host")
    assert peers[0].hear() == WhoAreYou()
    peers[0].say(1, Begin(op=1))
    assert peers[0].hear() == WhoAreYou()
    assert worker.frames() == []


def test_what_a_worker_says_of_an_ended_session_still_counts(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    attached(peers[0], supervisor, worker)
    token = peers[0].session
    report = Report(
        session=token,
        counters=[Series("canaryd_mismatches_total", ("content",), 1)],
        gauges=[Series("canaryd_slots", ("settled",), 4)],
        distributions=[],
    )
    assert peers[0].side is not None
    peers[0].side.close()
    wait_for("the end", lambda: supervisor.metrics().engines[0].state == "gone")
    with supervisor.lock:
        supervisor._handle(worker, report)  # type: ignore[arg-type]
        supervisor._handle(worker, Found(session=token, findings=[("content", {"group": "g"})]))  # type: ignore[arg-type]
        supervisor._handle(worker, Unmapped(session=token))  # type: ignore[arg-type]
        supervisor._handle(worker, report)  # type: ignore[arg-type]  # too late: it would count twice
    engine = supervisor.metrics().engines[0]
    assert engine.counters["canaryd_mismatches_total", ("content",)] == 1
    assert engine.gauges["canaryd_findings_open", ("content",)] == 1
    assert ("canaryd_slots", ("settled",)) not in engine.gauges


def test_the_engine_is_told_of_its_findings(supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]) -> None:
    for peer, name in zip(peers[:2], "ab", strict=True):
        attached(peer, supervisor, worker, name)
    ranges = [[slot, slot] for slot in range(limits.MAX_FINDING_RANGES + 1)]
    found = [("content", DETAIL), ("owner", DETAIL | {"slots": ranges, "slot_count": len(ranges), "row": ""})]
    with supervisor.lock:
        supervisor._handle(worker, Found(session=peers[1].session, findings=found))  # type: ignore[arg-type]
        first, second = supervisor.findings.open
    assert peers[1].hear() == Finding(id=first.id, check="content", group="g", slots=[(2, 3)], slot_count=2, row="r")
    joined = peers[1].hear()
    assert isinstance(joined, Finding)
    assert (joined.id, joined.check, joined.slot_count) == (second.id, "owner", limits.MAX_FINDING_RANGES + 1)
    assert len(joined.slots) == limits.MAX_FINDING_RANGES
    assert not peers[0].dealer.poll(50), "nobody hears of another engine's pool"


def test_the_engine_is_told_what_was_found_and_not_what_it_was_joined_to(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    attached(peers[0], supervisor, worker)
    found = [("content", DETAIL | {"slots": [[slot, slot]], "pages": [slot]}) for slot in range(2)]
    with supervisor.lock:
        supervisor.findings._max_open = 1
        supervisor._handle(worker, Found(session=peers[0].session, findings=found))  # type: ignore[arg-type]
    told = [peers[0].hear(), peers[0].hear()]
    assert [each.slots for each in told] == [[(0, 0)], [(1, 1)]]  # type: ignore[union-attr]


def test_a_full_disk_is_said_and_recovered_from(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    attached(peers[0], supervisor, worker)

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, supervisor.lock:
        patched.setattr(os, "write", full)
        found = Found(session=peers[0].session, findings=[("content", DETAIL)])
        supervisor._handle(worker, found)  # type: ignore[arg-type]
        assert supervisor.findings.waiting == 1
    status = supervisor.status()
    assert (status.findings_open, status.findings_write_failures) == (1, 1)
    wait_for("the retry", lambda: supervisor.status().findings_unwritten == 0)
    assert b'"opened"' in (supervisor.config.state_dir / "findings.jsonl").read_bytes()


def test_an_engine_is_forgotten_after_a_while(
    supervisor: Supervisor, worker: RecordingWorker, peers: list[Peer]
) -> None:
    attached(peers[0], supervisor, worker)
    with supervisor.lock:
        supervisor.findings.record_opened([("e", "host", "content", "p", {})])
    peers[0].close()
    wait_for("the end", lambda: supervisor.metrics().engines[0].state == "gone")
    with supervisor.lock:
        ended = supervisor.intake.records["e", "host"].ended
        assert ended is not None
        supervisor.intake.tick(ended + supervisor.config.engines.keep_gone - 1)
        assert supervisor.findings.open
        supervisor.intake.tick(ended + supervisor.config.engines.keep_gone + 1)
        assert not supervisor.findings.open
    assert supervisor.metrics().engines == ()
    peers.pop(0)


def test_find_worker_of_an_unknown_gpu(supervisor: Supervisor) -> None:
    with pytest.raises(AttachRefused, match="daemon watches: none"):
        supervisor.fleet.find(GPU, 0.0)

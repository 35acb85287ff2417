"""The client against a tiny daemon: attach, reattach, refusals, shutdown; and nothing ever raises into the engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_daemon import PATIENCE_SECONDS, FakeDaemon

from canaryd.client import NO_OP, Client, Final, SnapshotState, Timing, export_host_tensor, row_open
from canaryd.client.sender import FINDINGS_LIMIT
from canaryd.errors import MalformedFrame
from canaryd.wire.limits import MAX_SEQUENCE
from canaryd.wire.messages import (
    Attach,
    Begin,
    End,
    Finding,
    GroupSpec,
    Identity,
    Refused,
    RegionSpec,
    Rejected,
    Resync,
    Snapshot,
    WhoAreYou,
)

TIMING = Timing(retry_seconds=0.02, refused_retry_seconds=0.05, greeting_seconds=10, attaching_seconds=10)
GROUP = GroupSpec(
    name="full",
    num_pages=8,
    page_size=4,
    regions=[RegionSpec(name="k", memory=0, offset=0, page_stride=512, slot_stride=128, piece_bytes=128)],
)

MakeClient = Callable[..., Client]


@pytest.fixture
def make_client(tmp_path: Path) -> Iterator[MakeClient]:
    made: list[Client] = []

    def make(**changes: Any) -> Client:
        arguments: dict[str, Any] = {
            "socket_dir": tmp_path,
            "identity": Identity(engine="e"),
            "engine_kind": "test",
            "engine_version": "1",
            "groups": [GROUP],
            "memory": [export_host_tensor(torch.zeros(4096, dtype=torch.uint8))],
            "frees": True,
            "tiers": "none",
            "snapshot": SnapshotState,
            "timing": TIMING,
        }
        client = Client(**(arguments | changes))
        made.append(client)
        client.start()
        return client

    yield make
    for client in made:
        client.close()


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., FakeDaemon]]:
    made: list[FakeDaemon] = []

    def make(**options: Any) -> FakeDaemon:
        daemon = FakeDaemon(tmp_path, **options)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def write(op: int) -> Final:
    final = Final()
    final.write(0, ["r"], [1], [op], [op], [op % 32])
    return final


def test_attach_snapshot_stream(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    daemon = make_daemon()
    client = make_client(snapshot=lambda: SnapshotState(rows=[row_open("r", 0, [1], 2)]))
    daemon.until(lambda: bool(daemon.messages(Snapshot)), "the snapshot of an idle engine")
    op = client.begin()
    client.end(op, final=write(op))
    daemon.until(lambda: bool(daemon.messages(End)), "the end")
    assert [header.seq for header, _ in daemon.frames] == [0, 1, 2, 3]
    assert {header.session for header, _ in daemon.frames} == set(daemon.sessions)
    attach, snapshot, begin, end = (message for _, message in daemon.frames)
    assert isinstance(attach, Attach)
    assert attach.memories[0].fd_index == 1  # type: ignore[union-attr]
    assert len(daemon.fds) == 2
    assert snapshot == Snapshot(open_ops=[], rows=[row_open("r", 0, [1], 2)], cached=[])
    assert (begin, end.op) == (Begin(op=op), op)  # type: ignore[union-attr]
    assert daemon.page is not None
    assert daemon.page.read() == 3
    beats = len(daemon.beats)
    daemon.until(lambda: len(daemon.beats) >= beats + 2, "beats")
    assert daemon.beats[-1].seq == 3
    stats = client.stats
    assert (stats.state, stats.sent, stats.dropped, stats.attaches, stats.errors) == ("attached", 3, 0, 1, 0)
    assert stats.engine_seconds > 0


def test_client_starts_before_the_daemon(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    client = make_client()
    kept = client.begin("load")
    client.end(client.begin(), final=write(1))
    eventually(lambda: client.stats.state == "searching")
    daemon = make_daemon()
    daemon.until(lambda: client.stats.state == "attached")
    daemon.until(lambda: client.stats.snapshots == 0 and daemon.beats != [])
    client.end(client.begin())
    daemon.until(lambda: bool(daemon.messages(End)))
    _, snapshot, begin, end = (message for _, message in daemon.frames)
    assert isinstance(snapshot, Snapshot)
    assert [(op.op, op.lane) for op in snapshot.open_ops] == [(kept, "load")]
    assert isinstance(begin, Begin)
    assert isinstance(end, End)


def test_daemon_restarts(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    first = make_daemon()
    client = make_client()
    first.until(lambda: bool(first.messages(Snapshot)))
    open_op = client.begin()
    first.until(lambda: bool(first.messages(Begin)))
    first.close()
    eventually(lambda: client.stats.state != "attached")
    client.end(client.begin())
    second = make_daemon()
    second.until(lambda: client.stats.attaches == 2)
    client.end(client.begin())
    second.until(lambda: bool(second.messages(End)))
    assert [header.seq for header, _ in second.frames] == [0, 1, 2, 3]
    assert second.sessions != first.sessions
    snapshot = second.messages(Snapshot)[0]
    assert [op.op for op in snapshot.open_ops] == [open_op]  # type: ignore[union-attr]
    assert client.stats.reattaches == 1


def test_findings_wait_for_the_engine(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    client = make_client()
    assert client.poll_findings() == []
    daemon = make_daemon()
    daemon.until(lambda: client.stats.state == "attached")
    made = [
        Finding(id=f"a-{number}", check="content", group="full", slots=[(number, number)], slot_count=1)
        for number in range(FINDINGS_LIMIT + 3)
    ]
    for finding in made:
        daemon.say(finding)
    daemon.until(lambda: client.stats.findings == len(made))
    assert client.poll_findings() == made[3:], "the newest are kept, in order"
    assert client.stats.findings_dropped == 3
    assert client.poll_findings() == []
    daemon.say(made[0])
    daemon.until(lambda: client.stats.findings == len(made) + 1)
    client.close()
    assert client.poll_findings() == made[:1], "what came is not lost with the session"


def test_unknown_session_attaches_again(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    daemon.say(WhoAreYou(), session=bytes(16))  # an answer to another session changes nothing
    daemon.say(Rejected(seq=1, reason="malformed", detail="d"))
    daemon.until(lambda: client.stats.rejected == 1)
    assert client.stats.attaches == 1
    daemon.say(WhoAreYou())
    daemon.until(lambda: len(daemon.messages(Attach)) == 2 and client.stats.attaches == 2)
    assert len(set(daemon.sessions)) == 2
    daemon.until(lambda: daemon.gone == 1, "the end of the first side connection")


@pytest.mark.parametrize("where", ["side", "attach"])
def test_refusal_is_logged_once_and_tried_again(
    where: str, make_client: MakeClient, make_daemon: Callable[..., FakeDaemon], caplog: pytest.LogCaptureFixture
) -> None:
    refusal = Refused(reason="overlap", cause="Regions overlap.", remedy="Fix the strides.")
    daemon = make_daemon(**{"side_refuse" if where == "side" else "refuse": refusal})
    with caplog.at_level(logging.WARNING):
        client = make_client()
        daemon.until(lambda: daemon.refusals >= 3, "three attempts")
    assert caplog.text.count("Fix the strides.") == 1
    assert client.begin() != NO_OP
    daemon.refuse = daemon.side_refuse = None
    daemon.until(lambda: client.stats.state == "attached")


def test_resync_asks_for_another_snapshot(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    op = client.begin()
    daemon.say(Resync(cause="gap"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(daemon.messages(Snapshot)) < 2 and time.monotonic() < deadline:
        daemon.pump()
        client.end(client.begin("load"))
        time.sleep(0.002)
    assert [entry.op for entry in daemon.messages(Snapshot)[1].open_ops] == [op]  # type: ignore[union-attr]


def test_full_queue_drops_and_shows_a_gap(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    daemon = make_daemon()
    client = make_client(queue_limit=2)
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    with client._ops.lock:  # the sender cannot drain meanwhile
        for _ in range(5):
            client.begin()
    daemon.until(lambda: len(daemon.messages(Begin)) == 2)
    client.begin()
    daemon.until(lambda: len(daemon.messages(Begin)) == 3)
    assert [header.seq for header, _ in daemon.frames] == [0, 1, 2, 3, 7]
    assert client.stats.dropped == 3
    assert daemon.page is not None
    assert daemon.page.read() == 7


def test_message_too_large_for_a_frame_is_dropped(
    make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]
) -> None:
    daemon = make_daemon()
    many = bytes(8 * (1 << 20))
    client = make_client(snapshot=lambda: SnapshotState(rows=[row_open(f"{n}", 0, [1], 2, ids=many) for n in range(3)]))
    daemon.until(lambda: bool(daemon.messages(Snapshot)), "the snapshot without known ids")
    final = Final()
    final.free(0, bytes(17 * (1 << 20)))
    client.end(client.begin(), final=final)
    client.end(client.begin())
    daemon.until(lambda: bool(daemon.messages(End)))
    assert [header.seq for header, _ in daemon.frames] == [0, 1, 2, 4, 5]
    assert client.stats.dropped == 1


def told_wrong() -> Final:
    """Shows only when the message is made, on the client's thread."""
    final = Final()
    final.write(0, ["r"], [1], [0], [1.5], [2])  # type: ignore[list-item]
    return final


class Broken:
    def query(self) -> bool:
        raise RuntimeError("a sticky error")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def fail() -> Any:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize(
    "misuse",
    [
        lambda client: client.begin(lane=object()),
        lambda client: client.begin(scope=Broken()),
        lambda client: client.end(77),
        lambda client: client.end("x"),
        lambda client: client.end(client.begin(), final=Broken()),
        lambda client: client.end(client.begin(), status="???"),
        lambda client: client.end(client.begin(), final=told_wrong()),
        lambda client: client.end_after(client.begin(), [], final=told_wrong()),
        lambda client: client.end_after(client.begin(), [], final=told_wrong),
        lambda client: client.end_after(client.begin(), Broken()),
        lambda client: client.end_after(client.begin(), [Broken()]),
        lambda client: client.end_after(client.begin(), [], final=fail),
        lambda client: client.end_after(client.begin(), [], final=lambda: 3),
    ],
)
def test_misuse_turns_the_client_off_and_never_raises(
    misuse: Callable[[Client], Any],
    make_client: MakeClient,
    make_daemon: Callable[..., FakeDaemon],
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    with caplog.at_level(logging.ERROR):
        misuse(client)
        eventually(lambda: "client is off" in caplog.text)
    assert (client.stats.state, client.stats.errors) == ("off", 1)
    assert caplog.text.count("client is off") == 1
    assert client.begin() == NO_OP
    client.end(NO_OP)
    client.end_after(NO_OP, [Broken()])
    daemon.until(lambda: daemon.gone == 1, "the daemon to see the end")


def test_message_that_cannot_be_made_is_not_sent_and_leaves_a_gap(
    make_client: MakeClient, make_daemon: Callable[..., FakeDaemon], caplog: pytest.LogCaptureFixture
) -> None:
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    page = daemon.page
    assert page is not None
    with caplog.at_level(logging.ERROR), client._ops.lock:  # the sender sees all of it at once
        client.end(client.begin(), final=told_wrong())
        client.end(client.begin(), final=write(2))
    daemon.until(lambda: daemon.gone == 1, "the end of the session")
    daemon.pump()
    assert [header.seq for header, _ in daemon.frames] == [0, 1, 2]
    assert daemon.messages(End) == []
    assert page.read() == MAX_SEQUENCE
    assert (client.stats.state, client.stats.errors) == ("off", 1)
    assert caplog.text.count("client is off") == 1


@pytest.mark.parametrize("idle", [True, False])
def test_broken_snapshot_provider(idle: bool, make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    client = make_client(snapshot=fail)
    if not idle:
        client.begin()
    daemon = make_daemon()
    daemon.until(lambda: client.stats.attaches == 1)
    daemon.until(lambda: client.begin() == NO_OP if not idle else client.stats.errors == 1)
    eventually(lambda: client.stats.state == "off")


def test_nonsense_from_the_daemon_ends_the_session_only(
    make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]
) -> None:
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    assert daemon.peer_route is not None
    daemon._router.send_multipart([daemon.peer_route, b"nonsense"])
    daemon.until(lambda: client.stats.attaches == 2)
    assert client.stats.errors == 0


@pytest.mark.parametrize(
    "fall_silent",
    [
        lambda client, daemon: client.begin(lane=object()),
        lambda client, daemon: client.end(77),
        lambda client, daemon: client.end_after(client.begin(scope=[]), [Broken()]),
        lambda client, daemon: client.close(timeout=0),
        lambda client, daemon: daemon.say(WhoAreYou()),
        lambda client, daemon: daemon.connections[-1].close(),
    ],
)
def test_a_page_that_is_no_longer_raised_is_out_of_reach(
    fall_silent: Callable[[Client, FakeDaemon], Any], make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]
) -> None:
    """The daemon learns later than the engine that a session is over, and goes on reading the pool until then."""
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    page = daemon.page
    assert page is not None
    fall_silent(client, daemon)

    def every_op_raises_the_page() -> bool:
        before = page.read()
        client.begin()
        assert page.read() > before or before == MAX_SEQUENCE
        return before == MAX_SEQUENCE

    eventually(every_op_raises_the_page)


def test_contradictions_are_refused_at_construction(make_client: MakeClient) -> None:
    with pytest.raises(MalformedFrame):
        make_client(groups=[])


def test_close_sends_what_is_queued(make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]) -> None:
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    with client._ops.lock:
        ops = [client.begin() for _ in range(200)]
        closing = threading.Thread(target=client.close)
        closing.start()
    daemon.until(lambda: daemon.gone == 1, "the end of the side connection")
    daemon.pump()
    closing.join(PATIENCE_SECONDS)
    assert [message.op for message in daemon.messages(Begin)] == ops  # type: ignore[union-attr]
    assert client.begin() == NO_OP
    assert client.stats.state == "closed"
    client.close()


def test_close_without_a_daemon_returns(make_client: MakeClient) -> None:
    client = make_client()
    client.begin()
    client.close()
    assert client.stats.state == "closed"


def test_forked_child_is_off_and_does_not_hold_the_connection(
    make_client: MakeClient, make_daemon: Callable[..., FakeDaemon]
) -> None:
    daemon = make_daemon()
    client = make_client()
    daemon.until(lambda: bool(daemon.messages(Snapshot)))
    release, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        verdict = client.begin() == NO_OP and client.stats.state == "closed"
        client.close()
        os.read(release, 1)
        os._exit(0 if verdict else 1)
    os.close(release)
    op = client.begin()
    daemon.until(lambda: bool(daemon.messages(Begin)), "the parent to go on")
    assert daemon.messages(Begin) == [Begin(op=op)]
    client.close()
    daemon.until(lambda: daemon.gone == 1, "the end, though the child lives")
    os.close(hold)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

"""The side connection: credentials, descriptors, death, and no descriptor left open on any path."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from wire_examples import SESSION

from canaryd.errors import MalformedFrame, OversizedFrame
from canaryd.wire import limits
from canaryd.wire.messages import Hello, Refused, Welcome
from canaryd.wire.side import SideClient, SideConnection, SideListener, close_fds


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "side.sock"


@pytest.fixture
def listener(path: Path) -> Iterator[SideListener]:
    listener = SideListener(path)
    yield listener
    listener.close()
    assert not path.exists()


def accepted(listener: SideListener) -> SideConnection:
    assert select.select([listener], [], [], 10)[0]
    connection = listener.accept()
    assert connection is not None
    return connection


def raw_client(path: Path, data: bytes, fds: list[int]) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    client.sendmsg([data], rights)
    return client


def test_hello_carries_descriptors_and_credentials(path: Path, listener: SideListener) -> None:
    files = [os.memfd_create(str(number)) for number in range(3)]
    for number, fd in enumerate(files):
        os.write(fd, str(number).encode())
    assert listener.accept() is None
    client = SideClient(path, SESSION, files)
    assert client.receive_answer() is None
    connection = accepted(listener)
    assert tuple(connection.peer) == (os.getpid(), os.getuid(), os.getgid())
    greeting = connection.receive_hello()
    assert greeting is not None
    hello, received = greeting
    assert hello == Hello(session=SESSION, fds=3)
    assert [os.pread(fd, 9, 0) for fd in received] == [b"0", b"1", b"2"]
    assert not any(os.get_inheritable(fd) for fd in received)
    connection.answer(Welcome())
    assert client.receive_answer() == Welcome()
    assert connection.receive_hello() is None
    assert not connection.peer_is_gone()
    assert not client.peer_is_gone()
    client.close()
    assert connection.peer_is_gone()
    connection.close()
    close_fds([*files, *received])


def test_refusal_reaches_the_client_and_then_the_end(path: Path, listener: SideListener) -> None:
    page = os.memfd_create("page")
    client = SideClient(path, SESSION, [page])
    connection = accepted(listener)
    refusal = Refused(reason="peer_credentials", cause="c", remedy="r")
    connection.answer(refusal)
    connection.close()
    assert client.receive_answer() == refusal
    assert client.peer_is_gone()
    with pytest.raises(ConnectionError):
        client.receive_answer()
    client.close()
    os.close(page)


def test_no_daemon_costs_no_descriptor(path: Path) -> None:
    page = os.memfd_create("page")
    before = open_fds()
    for _ in range(3):
        with pytest.raises(OSError, match="No such file"):
            SideClient(path, SESSION, [page])
    SideListener(path).close()
    with pytest.raises(OSError, match="No such file"):
        SideClient(path, SESSION, [page])
    with pytest.raises(OversizedFrame):
        SideClient(path, SESSION, [page] * (limits.MAX_FDS + 1))
    assert open_fds() == before
    os.close(page)


GOOD = msgspec.msgpack.encode(Hello(session=SESSION, fds=2))


@pytest.mark.parametrize(
    ("data", "count", "error"),
    [
        pytest.param(b"nonsense", 2, MalformedFrame, id="nonsense"),
        pytest.param(GOOD, 1, MalformedFrame, id="too few"),
        pytest.param(GOOD, 3, MalformedFrame, id="too many"),
        pytest.param(GOOD, 0, MalformedFrame, id="none"),
        pytest.param(GOOD, limits.MAX_FDS + 1, OversizedFrame, id="beyond the limit"),
        pytest.param(GOOD, 253, OversizedFrame, id="as many as the kernel lets through"),
        pytest.param(GOOD + bytes(limits.MAX_SIDE_BYTES), 2, OversizedFrame, id="long"),
        pytest.param(msgspec.msgpack.encode(Hello(session=b"x", fds=2)), 2, MalformedFrame, id="session"),
        pytest.param(msgspec.msgpack.encode(Welcome()), 2, MalformedFrame, id="another message"),
        pytest.param(b"\x91" * 10000, 2, MalformedFrame, id="deep"),
    ],
)
def test_bad_hellos_leave_nothing_open(
    data: bytes, count: int, error: type[Exception], path: Path, listener: SideListener
) -> None:
    page = os.memfd_create("page")
    client = raw_client(path, data, [page] * count)
    connection = accepted(listener)
    before = open_fds()
    with pytest.raises(error):
        connection.receive_hello()
    assert open_fds() == before
    connection.close()
    client.close()
    os.close(page)


def test_client_that_goes_before_its_hello(path: Path, listener: SideListener) -> None:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    connection = accepted(listener)
    assert connection.receive_hello() is None
    client.close()
    with pytest.raises(ConnectionError):
        connection.receive_hello()
    connection.close()


def test_killed_engine_is_seen_at_once(path: Path, listener: SideListener) -> None:
    child = os.fork()
    if child == 0:
        client = SideClient(path, SESSION, [os.memfd_create("page")])
        signal.pause()
        os._exit(client.fileno())
    connection = accepted(listener)
    greeting = None
    while greeting is None:
        select.select([connection], [], [], 10)
        greeting = connection.receive_hello()
    assert connection.peer.pid == child
    assert not connection.peer_is_gone()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert connection.peer_is_gone()
    connection.close()
    close_fds(greeting[1])

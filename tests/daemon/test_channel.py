"""The supervisor-worker channel: frames and descriptors arrive whole, and nothing blocks or grows without bound."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator

import pytest

from canaryd.control.channel import MAX_BODY_BYTES, Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    made = Channel(left, limit_bytes=1 << 22), Channel(right, limit_bytes=1 << 22)
    yield made
    for each in made:
        each.close()


def test_frames_of_all_sizes_arrive_in_order(ends: tuple[Channel, Channel], seed: int) -> None:
    left, right = ends
    generator = random.Random(seed)
    sent = [generator.randbytes(generator.choice((0, 1, 7, 8, 9, 5000, 300_000))) for _ in range(60)]
    received: list[bytes] = []
    for body in sent:
        while not left.send(body):
            received += [each for each, _fds in right.receive()]
            left.flush()
    while left.wants_write or len(received) < len(sent):
        left.flush()
        received += [each for each, _fds in right.receive()]
    assert received == sent


def test_descriptors_arrive_with_their_frame(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    files = [os.memfd_create(f"m{number}") for number in range(5)]
    for number, fd in enumerate(files):
        os.write(fd, str(number).encode())
    left.send(b"none")
    left.send(b"two", files[:2])
    left.send(b"x" * 1_000_000)
    left.send(b"three", files[2:])
    for fd in files:
        os.close(fd)  # the channel has its own
    got: list[tuple[bytes, list[int]]] = []
    while len(got) < 4:
        left.flush()
        got += right.receive()
    assert [len(fds) for _body, fds in got] == [0, 2, 0, 3]
    read = [os.pread(fd, 9, 0) for _body, fds in got for fd in fds]
    assert read == [b"0", b"1", b"2", b"3", b"4"]
    for _body, fds in got:
        for fd in fds:
            os.close(fd)


def test_a_peer_that_does_not_read_costs_a_bounded_amount(ends: tuple[Channel, Channel]) -> None:
    left, _right = ends
    count = 0
    while left.send(b"x" * 100_000):
        count += 1
        assert count < 100
    assert left.wants_write
    assert not left.send(b"x" * 100_000)
    assert left.send(b"important", force=True)


def test_frames_before_the_end_are_delivered(ends: tuple[Channel, Channel]) -> None:
    left, right = ends
    left.send(b"last words")
    left.close()
    assert right.receive() == [(b"last words", [])]
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.send(b"x")


@pytest.mark.parametrize("header", [b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0\xff\xff\0\0", b"\0\0\0\0\x01\0\0\0"])
def test_broken_framing_ends_the_channel(header: bytes) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(right, limit_bytes=100)
    left.sendall(header)
    with pytest.raises(ChannelClosed):
        channel.receive()
    channel.close()
    left.close()


def test_what_is_too_large_is_refused(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(ValueError, match="too large"):
        ends[0].send(b"x" * (MAX_BODY_BYTES + 1))

"""The announce page: shared, monotone, sealed, read-only for the reader."""

from __future__ import annotations

import os

import pytest

from canaryd.errors import MalformedFrame
from canaryd.wire.announce import PAGE_BYTES, AnnouncePage


def test_reader_sees_what_the_writer_announces() -> None:
    writer = AnnouncePage.create()
    reader = AnnouncePage.from_fd(writer.fd)
    assert reader.read() == 0
    for number in (1, 255, 256, 1 << 40, (1 << 63) - 1):
        writer.raise_to(number)
        assert reader.read() == writer.read() == number
    assert os.pread(writer.fd, 8, 0) == ((1 << 63) - 1).to_bytes(8, "little")
    reader.close()
    writer.close()
    writer.close()


def test_page_is_never_lowered() -> None:
    page = AnnouncePage.create()
    page.raise_to(5)
    page.raise_to(5)
    with pytest.raises(ValueError, match="never lowered"):
        page.raise_to(4)
    assert page.read() == 5
    page.close()


def test_reader_cannot_write() -> None:
    writer = AnnouncePage.create()
    reader = AnnouncePage.from_fd(writer.fd)
    with pytest.raises(TypeError):
        reader.raise_to(1)
    with pytest.raises(ValueError, match="creator"):
        _ = reader.fd
    reader.close()
    writer.close()


def test_creator_cannot_shrink_the_file_under_the_reader() -> None:
    writer = AnnouncePage.create()
    with pytest.raises(PermissionError):
        os.ftruncate(writer.fd, 0)
    writer.close()


def test_reader_refuses_other_files() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, PAGE_BYTES)
    small = os.memfd_create("small", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    reader, writer = os.pipe()
    for fd in (unsealed, small, reader):
        with pytest.raises(MalformedFrame):
            AnnouncePage.from_fd(fd)
    for fd in (unsealed, small, reader, writer):
        os.close(fd)


def test_mapping_outlives_the_descriptor() -> None:
    writer = AnnouncePage.create()
    received = os.dup(writer.fd)
    reader = AnnouncePage.from_fd(received)
    os.close(received)
    writer.raise_to(3)
    assert reader.read() == 3
    reader.close()
    writer.close()

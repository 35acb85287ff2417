"""The announce page: one shared page that holds the highest sequence number a client has announced.

The client raises it before it enqueues a message; the worker reads it after a burst. One aligned 8-byte store and one
aligned 8-byte load, so that no reader sees half a number.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys

from canaryd.errors import MalformedFrame

PAGE_BYTES = 4096


class AnnouncePage:
    """A mapped announce page: writable where it was created, read-only where it was received.

    Create one with `create` (client) or `from_fd` (daemon). Not thread-safe: the client writes under its own lock.
    """

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("the announce page is little-endian, and so must be the machine")
        self._mapping = mapping
        # a native cast stores and loads all 8 bytes at once; struct.pack("<Q") writes them one by one
        self._cell = memoryview(mapping).cast("Q")
        self._fd = fd

    @classmethod
    def create(cls) -> AnnouncePage:
        """A new page at 0, in a sealed memory file of fixed size. Raises OSError."""
        fd = os.memfd_create("canaryd-announce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        return cls(mapping, fd)

    @classmethod
    def from_fd(cls, fd: int) -> AnnouncePage:
        """Map a received page read-only. `fd` stays the caller's.

        Raises MalformedFrame if the file is not one page of a size that is sealed: a file that its owner may shrink
        would kill the reader with SIGBUS.
        """
        try:
            size = os.fstat(fd).st_size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if size != PAGE_BYTES or not seals & fcntl.F_SEAL_SHRINK:
                raise MalformedFrame(f"an announce page is a sealed memory file of {PAGE_BYTES} bytes, got {size}")
            mapping = mmap.mmap(fd, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise MalformedFrame(f"the announce page cannot be mapped: {error.strerror}") from error
        return cls(mapping, None)

    @property
    def fd(self) -> int:
        """Descriptor to send to the daemon (creator only)."""
        if self._fd is None:
            raise ValueError("only the creator of an announce page has its descriptor")
        return self._fd

    @property
    def cell(self) -> memoryview:
        """The announced number as `cell[0]`, for a writer that only ever counts up. Released by `close`."""
        return self._cell

    def raise_to(self, number: int) -> None:
        """Announce `number`. Raises ValueError if that would lower the page."""
        if number < self._cell[0]:
            raise ValueError(f"the announce page is never lowered, from {self._cell[0]} to {number}")
        self._cell[0] = number

    def read(self) -> int:
        """The highest announced number."""
        return self._cell[0]

    def close(self) -> None:
        """Unmap, and close the creator's descriptor. May be called twice."""
        self._cell.release()
        self._mapping.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

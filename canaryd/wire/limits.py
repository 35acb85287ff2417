"""Every bound of the wire in one place. What is longer is answered "oversized" and never acted on."""

from __future__ import annotations

HEADER_BYTES = 32
SESSION_BYTES = 16
MAX_BODY_BYTES = 16 * 1024 * 1024
"""Largest msgpack body of one frame."""

MAX_SEQUENCE = (1 << 63) - 1
INT64_MIN = -(1 << 63)
INT64_MAX = (1 << 63) - 1

MAX_NAME_CHARS = 256
"""Names, versions, kinds, lanes, row ids and UUIDs."""
MAX_TEXT_CHARS = 4096
"""Causes, remedies and details in answers."""

MAX_GROUPS = 64
MAX_REGIONS_PER_GROUP = 4096
MAX_REGIONS = 16384
MAX_MEMORIES = 8192
MAX_RESERVED_RANGES = 1024
MAX_SLOTS = 1 << 40
"""Slots of one group."""
MAX_BYTES = 1 << 48
"""Sizes, offsets and strides."""
MAX_PIECES = 1 << 16
MAX_RANK = 1 << 20

MAX_ROWS = 1 << 16
"""Rows that one message may name in one of its lists (closed, opened, remaps, rows of one `Writes`)."""
MAX_RECORDS = 1 << 16
"""Page sets, writes or copies in one list of one message."""
MAX_COLUMN_ENTRIES = MAX_BODY_BYTES // 8
"""Entries of one column; the body's bound already implies it."""
MAX_SCOPE_PAGES = 1 << 20
"""Pages in all page sets of one op's scope."""
MAX_OPEN_OPS = 4096
"""Ops that may be open at once."""

MAX_FINDING_RANGES = 64
"""Ranges of slots that one finding names to the engine."""

MAX_FDS = 128
"""File descriptors in one `Hello`: the announce page and the host memories (the kernel's own bound is 253)."""
MAX_SIDE_BYTES = 16 * 1024
"""Largest datagram on the side connection."""

HANDLE_BYTES = 64
"""A CUDA IPC memory handle."""

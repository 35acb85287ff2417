"""One good message of each kind, and the columns they use."""

from __future__ import annotations

import array

from canaryd.wire.messages import (
    Attach,
    Attached,
    Beat,
    Begin,
    Copies,
    CudaIpcMemory,
    End,
    Finding,
    GroupSpec,
    HostShmMemory,
    Identity,
    PageSet,
    Refused,
    RegionSpec,
    Rejected,
    Remap,
    Resync,
    RowOpen,
    Snapshot,
    WhoAreYou,
    Writes,
)

SESSION = bytes(range(16))


def column(*values: int) -> bytes:
    return array.array("q", values).tobytes()


REGION = RegionSpec(name="layer 0", memory=0, offset=0, page_stride=64, slot_stride=16, piece_bytes=16)
GROUP = GroupSpec(name="full", num_pages=4, page_size=4, regions=[REGION], reserved=[(0, 4)])
ATTACH = Attach(
    identity=Identity(engine="engine", tp=1),
    engine_kind="transformers",
    engine_version="5.24",
    client_version="0.1.0",
    memories=[
        CudaIpcMemory(handle=bytes(64), offset=0, size=256, gpu_uuid="GPU-1"),
        HostShmMemory(fd_index=1, offset=0, size=256),
    ],
    groups=[GROUP],
)
BEGIN = Begin(op=1, lane="load", scope=[PageSet(group=0, pages=column(1, 2))])
ROW = RowOpen(row="r", group=0, pages=column(1, 2), length=5, namespace=-3, ids=column(7, 8))
WRITES = Writes(
    group=0,
    rows=["r", "q"],
    counts=column(2, 1),
    positions=column(0, 1, 9),
    tokens=column(5, 6, -1),
    slots=column(4, 5, 9),
)
END = End(
    op=1,
    status="failed",
    closed=["p"],
    opened=[ROW],
    remaps=[Remap(row="r", group=0, start=1, pages=column(3))],
    voids=[PageSet(group=0, pages=column(3))],
    writes=[WRITES],
    copies=[Copies(group=0, sources=column(4), destinations=column(5))],
    freed=[PageSet(group=0, pages=column())],
)
SNAPSHOT = Snapshot(open_ops=[BEGIN], rows=[ROW], cached=[PageSet(group=0, pages=column(0))])

TO_DAEMON = [(0, ATTACH), (1, BEGIN), (2, END), (3, SNAPSHOT), (3, Beat())]
FINDING = Finding(id="a-1", check="content", group="full", slots=[(4, 7), (9, 9)], slot_count=5, row="r")
TO_ENGINE = [
    Attached(described_ratio=0.5, scheme="native"),
    Refused(reason="overlap", cause="c", remedy="r"),
    Resync(cause="gap"),
    WhoAreYou(),
    Rejected(seq=3, reason="malformed", detail="d"),
    FINDING,
]

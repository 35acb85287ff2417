"""An engine in a process of its own: `engine_process.py SOCKET_DIR BEHAVIOUR DEVICE`.

BEHAVIOUR "stay" waits to be killed, "leave" ends with the client still open.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from canaryd.client import Client, Final, SnapshotState, Timing, export_cuda_tensor, export_host_tensor
from canaryd.wire.messages import GroupSpec, Identity, RegionSpec

PAGES, PAGE_SIZE, SLOT_BYTES = 16, 4, 96


def main() -> None:
    torch.set_num_threads(1)
    directory, behaviour, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    before = torch.zeros(1234, dtype=torch.uint8, device=device)  # so that the pool does not start its allocation
    pool = torch.zeros(PAGES * PAGE_SIZE, SLOT_BYTES, dtype=torch.uint8, device=device)
    region = RegionSpec(
        name="kv",
        memory=0,
        offset=0,
        page_stride=PAGE_SIZE * SLOT_BYTES,
        slot_stride=SLOT_BYTES,
        piece_bytes=SLOT_BYTES,
    )
    client = Client(
        socket_dir=directory,
        identity=Identity(engine="child"),
        engine_kind="test",
        engine_version="1",
        groups=[GroupSpec(name="full", num_pages=PAGES, page_size=PAGE_SIZE, regions=[region])],
        memory=[export_host_tensor(pool) if device == "cpu" else export_cuda_tensor(pool)],
        frees=True,
        tiers="none",
        snapshot=SnapshotState,
        # an engine that leaves does so long before its client's thread would send by itself
        timing=Timing(retry_seconds=0.02, poll_seconds=0.005 if behaviour == "stay" else 0.7),
    )
    client.start()
    while client.stats.snapshots == 0:
        time.sleep(0.002)
    for slot in range(3):
        op = client.begin()
        pool[slot] = slot + 1
        final = Final()
        final.write(0, ["row"], [1], [slot], [100 + slot], [slot])
        if device == "cpu":
            client.end(op, final=final)
        else:
            event = torch.cuda.Event()
            event.record()
            client.end_after(op, [event], final)
    if behaviour == "stay":
        time.sleep(600)
    del before


if __name__ == "__main__":
    main()

"""A tiny engine for tests: `python engine.py SOCKET_DIR NAME`, driven by JSON lines on stdin, answering on stdout.

Its pool is one memory file of two regions, four slots per page. It needs no torch, so it starts quickly.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
from typing import Any

from canaryd.client.client import Client
from canaryd.client.facts import Final, SnapshotState, row_open
from canaryd.client.memory import ExportedMemory
from canaryd.wire.messages import GroupSpec, HostShmMemory, Identity, RegionSpec

PAGE_SIZE = 4
SLOT_BYTES = 24  # not a multiple of 16, and a word and a half more than one
REGIONS = 2


class Pool:
    """`pages` pages of REGIONS regions, one behind the other, in a memory file."""

    def __init__(self, name: str, pages: int) -> None:
        self.pages = pages
        self.region_bytes = pages * PAGE_SIZE * SLOT_BYTES
        size = REGIONS * self.region_bytes
        self.fd = os.memfd_create(f"pool-{name}")
        os.ftruncate(self.fd, size)
        self.bytes = mmap.mmap(self.fd, size)
        self.bytes[:] = b"\xa5" * size

    def address(self, region: int, slot: int) -> int:
        return region * self.region_bytes + slot * SLOT_BYTES

    def group(self) -> GroupSpec:
        regions = [
            RegionSpec(
                name=f"layer{number}",
                memory=0,
                offset=number * self.region_bytes,
                page_stride=PAGE_SIZE * SLOT_BYTES,
                slot_stride=SLOT_BYTES,
                piece_bytes=SLOT_BYTES,
                layer=number,
            )
            for number in range(REGIONS)
        ]
        return GroupSpec(name="full", num_pages=self.pages, page_size=PAGE_SIZE, regions=regions)

    def exported(self) -> ExportedMemory:
        described = HostShmMemory(fd_index=1, offset=0, size=REGIONS * self.region_bytes)
        return ExportedMemory(memory=described, fd=os.dup(self.fd))


class Engine:
    """Rows that are written once and kept."""

    def __init__(self, socket_dir: str, name: str, pages: int) -> None:
        self.random = random.Random(20261201)
        self.pool = Pool(name, pages)
        self.rows: dict[str, tuple[list[int], list[int]]] = {}
        self.next_page = 0
        self.client = Client(
            socket_dir=socket_dir,
            identity=Identity(engine=name),
            engine_kind="tiny",
            engine_version="1",
            groups=[self.pool.group()],
            memory=[self.pool.exported()],
            frees=True,
            tiers="none",
            snapshot=self.snapshot,
        )
        self.client.start()

    def snapshot(self) -> SnapshotState:
        return SnapshotState(
            rows=[row_open(row, 0, pages, len(ids), ids=ids) for row, (pages, ids) in self.rows.items()]
        )

    def write(self, row: str, tokens: int) -> list[int]:
        """Open a row and write all of its tokens in one op; returns its slots."""
        count = -(-tokens // PAGE_SIZE)
        pages = list(range(self.next_page, self.next_page + count))
        self.next_page += count
        slots = [page * PAGE_SIZE + offset for page in pages for offset in range(PAGE_SIZE)][:tokens]
        ids = [self.random.randrange(32000) for _ in range(tokens)]
        op = self.client.begin()
        for slot in slots:
            for region in range(REGIONS):
                start = self.pool.address(region, slot)
                self.pool.bytes[start : start + SLOT_BYTES] = self.random.randbytes(SLOT_BYTES)
        self.rows[row] = (pages, ids)
        final = Final()
        final.open(row, 0, pages, 0, ids=ids)
        final.write(0, [row], [tokens], list(range(tokens)), ids, slots)
        self.client.end(op, final=final)
        return slots

    def flip(self, slot: int, region: int, byte: int, bit: int) -> None:
        """Damage the pool behind everyone's back."""
        self.pool.bytes[self.pool.address(region, slot) + byte] ^= 1 << bit

    def serve(self, request: dict[str, Any]) -> object:
        match request["do"]:
            case "write":
                return self.write(request["row"], request["tokens"])
            case "flip":
                return self.flip(request["slot"], request["region"], request["byte"], request["bit"])
            case "stats":
                stats = self.client.stats
                return {"state": str(stats.state), "attaches": stats.attaches, "rejected": stats.rejected}
            case "findings":
                found = self.client.poll_findings()
                return [[each.id, each.check, each.group, each.slots, each.slot_count, each.row] for each in found]
            case "begin":
                return self.client.begin()
            case "close":
                self.client.close()
        return None


def main() -> None:
    engine = Engine(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

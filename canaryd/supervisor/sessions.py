"""Sessions of clients, and the engines that they speak for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from canaryd.control.messages import HOST
from canaryd.errors import AttachRefused, OutOfOrder, RefusalReason
from canaryd.logs import event_logger
from canaryd.metrics.tallies import Key, Tally
from canaryd.wire.messages import Attach, Beat, CudaIpcMemory, Identity, ToDaemon
from canaryd.wire.side import SideConnection, close_fds

log = event_logger(__name__)


class State(StrEnum):
    """Where an engine is; the values of `canaryd_engine_state`."""

    ATTACHING = "attaching"
    ATTACHED = "attached"
    STALLED = "stalled"
    REFUSED = "refused"
    GONE = "gone"


@dataclass
class Session:
    """One connection of one client.

    `fds` are the side connection's descriptors, owned here; `process` identifies the peer; `peer` is its address at the
    router. `waiting`: the attach message, while no worker process runs that could take it. `forwarding`: frames go to
    the worker. `sent_away`: told to attach again, so its hanging up is no death.
    """

    token: bytes
    side: SideConnection
    fds: list[int]
    process: str
    peer: bytes = b""
    engine: EngineRecord | None = None
    last_seq: int = 0
    last_contact: float = 0.0
    waiting: bytes | None = None
    forwarding: bool = False
    sent_away: bool = False

    def check_order(self, seq: int, message: ToDaemon) -> None:
        """Accept the frame's number. Raises OutOfOrder, and then changes nothing."""
        if isinstance(message, Beat):
            if seq < self.last_seq:
                raise OutOfOrder(f"a beat carries the last number, {self.last_seq} or higher, got {seq}")
            return
        if seq <= self.last_seq:
            raise OutOfOrder(f"frame {seq} came after frame {self.last_seq}")
        self.last_seq = seq

    def close(self) -> None:
        """Hang up and close every descriptor."""
        self.side.close()
        close_fds(self.fds)
        self.fds = []


@dataclass
class EngineRecord:
    """One engine rank on one device: outlives its sessions, so that counters go on.

    `process` identifies the engine's process; `ended` is when its last session ended (monotonic seconds), `end_seen`
    whether that was the process's own end, `stamps_at_end` what was guarded then. `size` is the bytes of the
    attached memory. `busy_before` is what its bursts had cost when it was attached last, at `attached_unix`.
    """

    label: str
    device: str
    tally: Tally = field(default_factory=Tally)
    session: Session | None = None
    state: State = State.GONE
    info: dict[str, str] = field(default_factory=dict)
    process: str = ""
    ended: float | None = None
    end_seen: bool = False
    stamps_at_end: int = 0
    last_contact_unix: float | None = None
    gauges: dict[Key, float] = field(default_factory=dict)
    described_ratio: float | None = None
    slots: int = 0
    size: int = 0
    refusal: str = ""
    geometry: list[dict[str, object]] = field(default_factory=list)
    attached_unix: float | None = None
    busy_before: float = 0.0
    was_attached: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The values of the labels engine and gpu_uuid."""
        return self.label, self.device

    def stop_watching(self) -> int:
        """The session's watch ends: forget its gauges; returns how many stamps ended with it."""
        stamps = int(self.gauges.get(("canaryd_slots", ("settled",)), 0.0))
        self.gauges = {}
        return stamps

    def lose(self, stamps: int, cause: str) -> None:
        """Memory that still stands lost its stamps: coverage begins anew."""
        self.stamps_at_end = 0
        if stamps:
            self.tally.count("canaryd_stamps_lost_total", by=stamps)
            log.warning("coverage lost", engine=self.label, device=self.device, stamps=stamps, cause=cause)


def label_of(identity: Identity) -> str:
    """The `engine` label: the engine's name, with its ranks where they are not all zero (`name:dp1:tp3`)."""
    ranks = {"dp": identity.dp, "pp": identity.pp, "tp": identity.tp, "cp": identity.cp}
    return identity.engine + "".join(f":{name}{rank}" for name, rank in ranks.items() if rank)


def device_of(attach: Attach) -> str:
    """The one device that holds all of the pool: a GPU's UUID, or `HOST`. Raises AttachRefused for a mixture."""
    devices = {memory.gpu_uuid if isinstance(memory, CudaIpcMemory) else HOST for memory in attach.memories}
    if len(devices) != 1:
        raise AttachRefused(
            RefusalReason.MEMORY_KIND,
            f"The pool lies on {len(devices)} devices, and an attachment describes one.",
            "Attach each device's part with a client and a rank of its own.",
        )
    return devices.pop()


def info_of(attach: Attach) -> dict[str, str]:
    """The values of `canaryd_engine_info`; the scheme is known once the pool is attached."""
    tables = sorted({group.table for group in attach.groups})
    identity = attach.identity
    return {
        "name": identity.engine,
        "kind": attach.engine_kind,
        "version": attach.engine_version,
        "client_version": attach.client_version,
        "model": attach.model,
        "scheme": attach.scheme or "",
        "table": ",".join(tables),
        "frees": str(attach.frees).lower(),
        "tiers": attach.tiers,
        "dp": str(identity.dp),
        "pp": str(identity.pp),
        "tp": str(identity.tp),
        "cp": str(identity.cp),
    }


def geometry_of(attach: Attach) -> list[dict[str, object]]:
    """The pool's shape, one entry per group, regions of one shape counted together. No address and no handle."""
    described: list[dict[str, object]] = []
    for group in attach.groups:
        shapes = Counter(
            (
                each.part,
                each.dtype,
                each.page_stride,
                each.slot_stride,
                each.piece_bytes,
                each.pieces,
                each.piece_stride,
            )
            for each in group.regions
        )
        names = ("part", "dtype", "page_stride", "slot_stride", "piece_bytes", "pieces", "piece_stride")
        described.append(
            {
                "group": group.name,
                "num_pages": group.num_pages,
                "page_size": group.page_size,
                "table": group.table,
                "ring": group.ring,
                "holes_ok": group.holes_ok,
                "regions": [
                    {"count": count, **dict(zip(names, shape, strict=True))} for shape, count in shapes.items()
                ],
            }
        )
    return described


def process_key(pid: int) -> str:
    """What identifies a process on this machine until it is rebooted and after; empty if it cannot be seen."""
    if pid <= 0:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name in parentheses may hold anything: the fields are counted from its end. Field 22 is the start time.
    return f"{boot}-{pid}-{stat[stat.rindex(')') + 2 :].split()[19]}"

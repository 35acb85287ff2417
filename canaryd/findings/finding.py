"""One finding, from its first sight to its acknowledgement."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

_RANKS = re.compile(r"(:(dp|pp|tp|cp)\d+)+$")


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What the GPU counts of its own memory. None: the GPU does not say.

    `uncorrected` and `corrected` are ECC errors since the driver was loaded; `new_uncorrected` and `xids` (the driver's
    error numbers, oldest first, bounded) are of the last ten minutes.
    """

    time: float
    ecc: bool | None = None
    corrected: int | None = None
    uncorrected: int | None = None
    new_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    xids: tuple[int, ...] = ()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One confirmed corruption.

    Times are Unix seconds. `process` identifies the engine's process, so that a finding ends with the memory that it
    speaks of (empty: unknown). `detail` is what the core said when it was last seen: group, slots, class, owner.
    `count` is how often this place was found; `joined` how many other findings are counted here because too many were
    open. `standing`: whether the damaged bytes are still there, as far as is known; `readers` how many live requests
    hold the page. `incident` is shared by findings of several ranks of one engine. `ended`, `by`, `note` and `cause`
    say when, by whom and why it is no longer open.
    """

    id: str
    engine: str
    gpu_uuid: str
    check: str
    opened: float
    process: str
    detail: dict[str, Any]
    state: Literal["open", "acknowledged", "closed"] = "open"
    last_seen: float = 0.0
    count: int = 1
    joined: int = 0
    standing: Literal["unknown", "there", "overwritten"] = "unknown"
    readers: int | None = None
    incident: str = ""
    hardware: Hardware | None = None
    verdict: Literal["hardware likely", "software likely", "unknown"] = "unknown"
    why: str = ""
    ended: float | None = None
    by: str = ""
    note: str = ""
    cause: str = ""

    @property
    def classification(self) -> str:
        """The class of the damage, such as `bit_flip`."""
        return str(self.detail.get("classification", "unknown"))

    @property
    def place(self) -> tuple[str, ...]:
        """What a repeat has in common with it."""
        where = (self.detail.get(name) for name in ("group", "slots", "pages", "region", "byte_offset"))
        return (self.engine, self.gpu_uuid, self.process, self.check, *map(str, where))


def base_name(engine: str) -> str:
    """The engine's name without its ranks: `llm:dp1:tp3` is a rank of `llm`."""
    return _RANKS.sub("", engine)

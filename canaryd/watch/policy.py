"""What the core promises and how much it may do: set once per attachment, from configuration."""

from __future__ import annotations

from dataclasses import dataclass

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Pace and limits of one attachment's watch. Times in seconds, sizes in bytes. Raises ValueError on values that
    make no sense.

    Args:
        tick_seconds: period of full bursts.
        max_age_live: greatest age of the last content check of a slot that an open row holds.
        max_age_idle: the same for slots that only a cache holds.
        reread_after: a suspect's second read is due this long after the first was judged (10 to 20 ms).
        bytes_per_burst: pool bytes that one burst may read.
        max_stamps_per_burst, max_link_items_per_burst, max_findings_per_burst: bounds of one burst.
        op_stall_seconds: an op open for longer is reported as stalled.
        resync_retry_seconds: a snapshot that does not come is asked for again after this time.
        max_rows, max_open_ops, max_provisional_bursts, max_suspects: bounds of what is remembered.
    """

    tick_seconds: float = 0.1
    max_age_live: float = 5.0
    max_age_idle: float = 60.0
    reread_after: float = 0.015
    bytes_per_burst: int = 64 * MEBIBYTE
    max_stamps_per_burst: int = 65536
    max_link_items_per_burst: int = 65536
    max_findings_per_burst: int = 64
    op_stall_seconds: float = 30.0
    resync_retry_seconds: float = 5.0
    max_rows: int = 65536
    max_open_ops: int = 4096
    max_provisional_bursts: int = 16
    max_suspects: int = 65536

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"policy: {name} must be positive, got {value}")
        if self.max_age_live > self.max_age_idle:
            raise ValueError(
                f"policy: max_age_live ({self.max_age_live}) must not exceed max_age_idle ({self.max_age_idle})"
            )

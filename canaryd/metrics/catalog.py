"""Every metric that canaryd exports: name, kind, help, labels, and the label values that are known in advance.

The names are promised to alert rules and dashboards. Values that are known in advance are exported as 0 from the start:
a counter that is first seen at 1 never satisfies an `increase()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from canaryd.errors import RefusalReason

CHECKS = (
    "content",
    "chain",
    "token",
    "position",
    "owner",
    "lifetime",
    "landed",
    "range",
    "nonfinite",
    "copy",
    "input",
)
ENGINE_STATES = ("attaching", "attached", "stalled", "refused", "gone")
MESSAGE_KINDS = ("attach", "begin", "end", "snapshot", "beat")
REJECTIONS = ("malformed", "oversized", "unknown_version", "unknown_session", "out_of_order")
SLOT_STATES = (
    "unknown",
    "void",
    "pending",
    "provisional",
    "settled",
    "suspect",
    "damaged",
    "freed",
    "doubt",
    "reserved",
)
DISMISSALS = (
    "generation",
    "scope",
    "freed",
    "row_changed",
    "gap",
    "not_reproduced",
    "unconfirmed",
    "superseded",
    "limit",
    "lost",
)
STAMP_DROPS = ("generation", "scope", "freed", "gap", "lost")
VERIFY_MODES = ("live", "idle", "doubt", "second_read", "links")
SKIPS = ("freed", "voided", "rewritten", "gap", "forgotten", "unknown_prefix", "stalled")
REBLESS_CAUSES = ("attach", "gap", "revived")
ODDITIES = (
    "unknown_op",
    "duplicate_op",
    "unknown_row",
    "duplicate_row",
    "unknown_group",
    "bad_column",
    "bad_page",
    "frees_not_promised",
    "unasked_snapshot",
    "row_limit",
    "op_limit",
    "stalled_op",
    "copy_limit",
    "truncated",
)
KERNELS = ("plan", "digest", "write", "compare", "verify")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One metric.

    `scope` says which labels stand before the family's own: `engine` (engine, gpu_uuid), `worker` (gpu_uuid) or
    `daemon` (none). `known` are label values that are exported as 0 from the start. `living`: a gauge that says nothing
    about an engine that is gone, and vanishes with it.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    scope: Literal["engine", "worker", "daemon"]
    labels: tuple[str, ...] = ()
    known: tuple[tuple[str, ...], ...] = ()
    living: bool = True

    @property
    def prefix(self) -> tuple[str, ...]:
        """The labels that the scope puts first."""
        return {"engine": ("engine", "gpu_uuid"), "worker": ("gpu_uuid",), "daemon": ()}[self.scope]


def _each(values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


_NONE: tuple[tuple[str, ...], ...] = ((),)


def _counter(
    name: str,
    text: str,
    scope: Literal["engine", "worker", "daemon"] = "engine",
    labels: tuple[str, ...] = (),
    known: tuple[tuple[str, ...], ...] = _NONE,
) -> Family:
    return Family(name=name, kind="counter", help=text, scope=scope, labels=labels, known=known)


def _gauge(
    name: str,
    text: str,
    scope: Literal["engine", "worker", "daemon"] = "engine",
    labels: tuple[str, ...] = (),
    known: tuple[tuple[str, ...], ...] = (),
    *,
    living: bool = True,
) -> Family:
    return Family(name=name, kind="gauge", help=text, scope=scope, labels=labels, known=known, living=living)


FAMILIES: tuple[Family, ...] = (
    # --- findings
    _counter(
        "canaryd_mismatches_total",
        "Confirmed corruptions of KV-cache slots. check: "
        + ", ".join(CHECKS)
        + ". Values that are not finite may also come from the model.",
        labels=("check",),
        known=_each(CHECKS),
    ),
    _gauge(
        "canaryd_findings_open",
        "Findings that nobody has acknowledged and whose engine has not gone. Survives restarts of the daemon.",
        labels=("check",),
        known=_each(CHECKS),
        living=False,
    ),
    _counter("canaryd_suspects_total", "Mismatches that a burst saw, before they were read a second time."),
    _counter(
        "canaryd_suspects_dismissed_total",
        "Suspects that a legal write or a gap in the stream explains. reason: " + ", ".join(DISMISSALS) + ".",
        labels=("reason",),
        known=_each(DISMISSALS),
    ),
    # --- coverage
    _gauge("canaryd_slots", "Slots by state: " + ", ".join(SLOT_STATES) + ".", labels=("state",)),
    _counter("canaryd_slots_stamped_total", "Slots whose bytes were read and stamped."),
    _counter(
        "canaryd_slots_verified_total",
        "Slots compared with their stamps. mode: links (stamp against row); with all bytes read: live, idle, doubt, "
        "second_read.",
        labels=("mode",),
        known=_each(VERIFY_MODES),
    ),
    _counter("canaryd_bytes_verified_total", "Bytes of the pool that were read and compared or stamped."),
    _counter(
        "canaryd_slots_skipped_total",
        "Slots whose content was never guarded. reason: " + ", ".join(SKIPS) + ".",
        labels=("reason",),
        known=_each(SKIPS),
    ),
    _counter(
        "canaryd_reblessed_total",
        "Slots whose bytes were stamped though nobody vouched for them. cause: " + ", ".join(REBLESS_CAUSES) + ".",
        labels=("cause",),
        known=_each(REBLESS_CAUSES),
    ),
    _gauge(
        "canaryd_oldest_unverified_timestamp_seconds",
        "Unix time at which the settled slot that has waited longest was last verified.",
    ),
    _gauge("canaryd_pass_coverage_ratio", "Share (0 to 1) of settled slots that the running pass has compared."),
    _gauge("canaryd_pass_last_completion_timestamp_seconds", "Unix time at which the last complete pass ended."),
    _gauge("canaryd_pass_last_duration_seconds", "Seconds that the last complete pass took."),
    _gauge("canaryd_pass_last_slots", "Slots that the last complete pass compared."),
    Family(
        name="canaryd_stamp_lag_seconds",
        kind="histogram",
        help="Seconds from the end of the write to the stamp's read.",
        scope="engine",
    ),
    Family(
        name="canaryd_unguarded_seconds",
        kind="histogram",
        help="Seconds from the begin of the write until its stamp is final: damage in this window may be blessed.",
        scope="engine",
    ),
    _gauge("canaryd_pool_described_ratio", "Share (0 to 1) of the attached memory that regions describe."),
    _counter(
        "canaryd_stamps_dropped_total",
        "Stamps that did not become final. reason: " + ", ".join(STAMP_DROPS) + ".",
        labels=("reason",),
        known=_each(STAMP_DROPS),
    ),
    _gauge("canaryd_unguarded_ratio", "Share (0 to 1) of slots with content whose damage would not be seen now."),
    _gauge(
        "canaryd_reserved_nonfinite_slots",
        "Reserved slots (padding) that held NaN or infinity when last scanned: a warning, no corruption.",
    ),
    _gauge("canaryd_suspects_open", "Suspects that wait for their second read."),
    _gauge("canaryd_rows_open", "Rows (requests) that the engine has open."),
    _gauge("canaryd_ops_open", "Ops that the engine has open; nothing can be judged while one stays open."),
    _gauge("canaryd_ops_stalled", "Ops that are open for too long."),
    _counter(
        "canaryd_stamps_lost_total", "Stamps that were lost with a worker, a daemon or a session; coverage restarts."
    ),
    # --- cost
    _counter(
        "canaryd_gpu_busy_seconds_total",
        "Seconds that bursts took; on a GPU from first to last kernel, waiting for the engine's time slices included.",
    ),
    _counter(
        "canaryd_client_seconds_total",
        "Seconds of the engine's threads that the client took.",
    ),
    _counter(
        "canaryd_kernel_launches_total",
        "Launches by kernel, without the self-test's. kernel: " + ", ".join(KERNELS) + ".",
        scope="worker",
        labels=("kernel",),
        known=_each(KERNELS),
    ),
    _counter(
        "canaryd_kernel_failures_total",
        "Bursts that failed on the device.",
        scope="worker",
        labels=("kernel",),
        known=_each(("burst",)),
    ),
    _counter(
        "canaryd_kernel_argument_validation_failures_total",
        "Launches that were refused because an argument breaks the kernels' contract.",
        scope="worker",
        labels=("kernel", "argument", "check"),
        known=(),
    ),
    # --- the stream
    _counter(
        "canaryd_engine_messages_total",
        "Accepted messages by kind.",
        labels=("kind",),
        known=_each(MESSAGE_KINDS),
    ),
    _counter("canaryd_engine_message_gaps_total", "Gaps in an engine's stream; each asks for a snapshot."),
    _counter(
        "canaryd_engine_oddities_total",
        "Messages that contradict what was said before, by kind.",
        labels=("kind",),
        known=_each(ODDITIES),
    ),
    _counter("canaryd_engine_frames_dropped_total", "Frames that a worker was too slow to take; each shows as a gap."),
    _counter(
        "canaryd_engine_messages_rejected_total",
        "Frames that were not acted on. reason: " + ", ".join(REJECTIONS) + ".",
        scope="daemon",
        labels=("reason",),
        known=_each(REJECTIONS),
    ),
    _counter("canaryd_attach_attempts_total", "Attachments that engines asked for.", scope="daemon"),
    _counter(
        "canaryd_attach_failures_total",
        "Attachments that were refused, by reason.",
        scope="daemon",
        labels=("reason",),
        known=_each(tuple(reason.value for reason in RefusalReason)),
    ),
    _gauge(
        "canaryd_engine_state",
        "1 for the state the engine is in, 0 for the others. state: " + ", ".join(ENGINE_STATES) + ".",
        labels=("state",),
        living=False,
    ),
    _gauge("canaryd_engine_last_contact_timestamp_seconds", "Unix time of the last frame.", living=False),
    # --- the daemon itself
    _gauge("canaryd_worker_up", "Whether the device's worker is ready (1) or not (0).", scope="worker"),
    _counter("canaryd_worker_restarts_total", "Workers that died or hung and were started again.", scope="worker"),
    _gauge(
        "canaryd_selftest_last_success_timestamp_seconds",
        "Unix time at which the worker last planted a fault and saw it.",
        scope="worker",
    ),
    _counter("canaryd_selftest_runs_total", "Self-tests that were run.", scope="worker"),
    _counter(
        "canaryd_selftest_kernel_launches_total",
        "Launches of the self-test by kernel: those of bursts, and the contract's launchers.",
        scope="worker",
        labels=("kernel",),
        known=_each(KERNELS),
    ),
    _counter("canaryd_selftest_failures_total", "Self-tests that missed a planted fault or failed.", scope="worker"),
    _counter("canaryd_findings_write_failures_total", "Writes of the findings file that failed.", scope="daemon"),
    _counter("canaryd_findings_lost_total", "Finding records that were dropped unwritten.", scope="daemon"),
    _gauge("canaryd_findings_unwritten", "Finding records that wait for the disk.", scope="daemon"),
)

BY_NAME = {family.name: family for family in FAMILIES}
INFO_LABELS = (
    "name",
    "kind",
    "version",
    "client_version",
    "model",
    "scheme",
    "table",
    "frees",
    "tiers",
    "dp",
    "pp",
    "tp",
    "cp",
)
"""Labels of `canaryd_engine_info` behind engine and gpu_uuid."""

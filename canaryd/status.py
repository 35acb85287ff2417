"""The status document: what an operator must know first, as versioned JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import msgspec
from pydantic import BaseModel, ConfigDict

from canaryd import __version__
from canaryd.metrics.tallies import Key
from canaryd.supervisor.sessions import EngineRecord, State
from canaryd.supervisor.workers import WorkerProcess, WorkerState

if TYPE_CHECKING:
    from canaryd.supervisor.supervisor import Supervisor

STATUS_VERSION = 1
MAX_FINDINGS = 100
"""Findings listed in the status document; `/findings` lists all."""
Overall = Literal["ok", "degraded", "corrupt"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineStatus(_Model):
    """One engine rank. Ratios are 0 to 1, times Unix seconds, ages seconds; None: not known."""

    engine: str
    gpu_uuid: str
    state: str
    refusal: str
    info: dict[str, str]
    last_contact_age: float | None
    slots: dict[str, int]
    described_ratio: float | None
    unguarded_ratio: float | None
    pass_coverage_ratio: float | None
    pass_last_completion: float | None
    oldest_unverified_age: float | None
    rows_open: int
    ops_open: int
    ops_stalled: int
    slots_stamped: int
    slots_verified: int
    bytes_verified: int
    mismatches: dict[str, int]
    skipped: dict[str, int]
    suspects_dismissed: dict[str, int]
    reblessed: dict[str, int]
    message_gaps: int
    stamps_lost: int
    busy_seconds: float


class WorkerStatus(_Model):
    """One worker process."""

    device: str
    state: str
    pid: int | None
    description: str
    restarts: int
    resident_bytes: int
    launches: dict[str, int]
    selftest_age: float | None
    selftest_failures: int


class FindingStatus(_Model):
    """One open finding, as `Finding` describes it; `age` is seconds since it was opened."""

    id: str
    engine: str
    gpu_uuid: str
    check: str
    opened: float
    age: float
    last_seen: float
    count: int
    joined: int
    standing: str
    readers: int | None
    incident: str
    verdict: str
    why: str
    hardware: dict[str, object] | None
    detail: dict[str, object]


class StatusDocument(_Model):
    """Everything at once; `status_version` rises when a field changes its meaning."""

    status_version: int
    overall: Overall
    meaning: str
    action: str
    version: str
    config_source: str
    uptime: float
    engines: list[EngineStatus]
    workers: list[WorkerStatus]
    findings_open: int
    findings: list[FindingStatus]
    findings_unwritten: int
    findings_write_failures: int
    attach_failures: dict[str, int]
    messages_rejected: dict[str, int]


def status_document(supervisor: Supervisor) -> StatusDocument:
    """The document of this moment. Used under the supervisor's lock."""
    now, unix = time.monotonic(), time.time()
    records = list(supervisor.intake.records.values())
    engines = [_engine(record, unix) for record in records]
    workers = [_worker(worker, unix) for worker in supervisor.fleet.all]
    daemon = supervisor.intake.tally.counters()
    findings = supervisor.findings
    open_count = sum(findings.open_counts().values())
    overall, meaning, action = _verdict(open_count, engines, workers, findings.waiting, now - supervisor.started)
    return StatusDocument(
        status_version=STATUS_VERSION,
        overall=overall,
        meaning=meaning,
        action=action,
        version=__version__,
        config_source=supervisor.source,
        uptime=now - supervisor.started,
        engines=engines,
        workers=workers,
        findings_open=open_count,
        findings=finding_list(supervisor)[:MAX_FINDINGS],
        findings_unwritten=findings.waiting,
        findings_write_failures=findings.write_failures,
        attach_failures=_by_label(daemon, "canaryd_attach_failures_total"),
        messages_rejected=_by_label(daemon, "canaryd_engine_messages_rejected_total"),
    )


def finding_list(supervisor: Supervisor) -> list[FindingStatus]:
    """The open findings, oldest first. Used under the supervisor's lock."""
    unix = time.time()
    return [
        FindingStatus(
            id=each.id,
            engine=each.engine,
            gpu_uuid=each.gpu_uuid,
            check=each.check,
            opened=each.opened,
            age=max(0.0, unix - each.opened),
            last_seen=each.last_seen,
            count=each.count,
            joined=each.joined,
            standing=each.standing,
            readers=each.readers,
            incident=each.incident,
            verdict=each.verdict,
            why=each.why,
            hardware=None if each.hardware is None else msgspec.to_builtins(each.hardware),
            detail=each.detail,
        )
        for each in supervisor.findings.open
    ]


def _verdict(
    open_count: int, engines: list[EngineStatus], workers: list[WorkerStatus], unwritten: int, uptime: float
) -> tuple[Overall, str, str]:
    if open_count:
        return (
            "corrupt",
            f"{open_count} findings of KV-cache corruption stand: replies that used these slots may be wrong.",
            "Drain and restart the affected engine; keep findings.jsonl for the report.",
        )
    troubles = [f"{each.engine} on {each.gpu_uuid} is {each.state}" for each in engines if each.state != "attached"]
    troubles += [f"worker {each.device} is {each.state}" for each in workers if each.state != WorkerState.READY]
    troubles += [f"the self-test of {each.device} has failed" for each in workers if each.selftest_failures]
    if unwritten:
        troubles.append(f"{unwritten} finding records wait for the disk")
    if troubles:
        return "degraded", "; ".join(troubles) + ".", "See engines and workers below, and the log."
    if not engines:
        return (
            "degraded",
            f"No engine is attached, {uptime:.0f} s after the start: nothing is watched.",
            "Start an engine with canaryd's client and the same socket_dir.",
        )
    unguarded = max((each.unguarded_ratio or 0.0 for each in engines), default=0.0)
    return (
        "ok",
        f"No corruption stands in what was looked at; at most {unguarded:.1%} of an engine's content is unguarded.",
        "Nothing to do.",
    )


def _engine(record: EngineRecord, unix: float) -> EngineStatus:
    counters, gauges = record.tally.counters(), record.gauges

    def gauge(name: str) -> float | None:
        return gauges.get((name, ()))

    def total(name: str) -> int:
        return int(sum(value for key, value in counters.items() if key[0] == name))

    return EngineStatus(
        engine=record.label,
        gpu_uuid=record.device,
        state=record.state.value,
        refusal=record.refusal if record.state is State.REFUSED else "",
        info=record.info,
        last_contact_age=_age(record.last_contact_unix, unix),
        slots=_by_label(gauges, "canaryd_slots"),
        described_ratio=record.described_ratio,
        unguarded_ratio=gauge("canaryd_unguarded_ratio"),
        pass_coverage_ratio=gauge("canaryd_pass_coverage_ratio"),
        pass_last_completion=gauge("canaryd_pass_last_completion_timestamp_seconds"),
        oldest_unverified_age=_age(gauge("canaryd_oldest_unverified_timestamp_seconds"), unix),
        rows_open=int(gauge("canaryd_rows_open") or 0),
        ops_open=int(gauge("canaryd_ops_open") or 0),
        ops_stalled=int(gauge("canaryd_ops_stalled") or 0),
        slots_stamped=total("canaryd_slots_stamped_total"),
        slots_verified=total("canaryd_slots_verified_total"),
        bytes_verified=total("canaryd_bytes_verified_total"),
        mismatches=_by_label(counters, "canaryd_mismatches_total"),
        skipped=_by_label(counters, "canaryd_slots_skipped_total"),
        suspects_dismissed=_by_label(counters, "canaryd_suspects_dismissed_total"),
        reblessed=_by_label(counters, "canaryd_reblessed_total"),
        message_gaps=total("canaryd_engine_message_gaps_total"),
        stamps_lost=total("canaryd_stamps_lost_total"),
        busy_seconds=sum(value for key, value in counters.items() if key[0] == "canaryd_gpu_busy_seconds_total"),
    )


def _worker(worker: WorkerProcess, unix: float) -> WorkerStatus:
    counters = worker.tally.counters()
    return WorkerStatus(
        device=worker.device,
        state=worker.state.value,
        pid=worker.pid,
        description=worker.description,
        restarts=worker.restarts,
        resident_bytes=worker.rss_bytes,
        launches=_by_label(counters, "canaryd_kernel_launches_total"),
        selftest_age=_age(worker.gauges.get(("canaryd_selftest_last_success_timestamp_seconds", ())), unix),
        selftest_failures=int(counters.get(("canaryd_selftest_failures_total", ()), 0)),
    )


def _by_label(values: dict[Key, float], name: str) -> dict[str, int]:
    """The values of one family with one label, those that are not zero."""
    return {labels[0]: int(value) for (key, labels), value in values.items() if key == name and labels and value}


def _age(unix_then: float | None, unix: float) -> float | None:
    return None if unix_then is None else max(0.0, unix - unix_then)

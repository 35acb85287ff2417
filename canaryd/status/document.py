"""The status document: what an operator must know first, as versioned JSON."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from canaryd import __version__
from canaryd.findings import Finding
from canaryd.metrics.tallies import Key
from canaryd.status.models import STATUS_VERSION, EngineStatus, FindingStatus, StatusDocument, WorkerStatus
from canaryd.status.problems import find_problems, healthy
from canaryd.supervisor.sessions import EngineRecord, State
from canaryd.supervisor.workers import WorkerProcess

if TYPE_CHECKING:
    from canaryd.supervisor.supervisor import Supervisor

MAX_FINDINGS = 100
"""Findings listed in the status document; `/findings` lists all."""


def status_document(supervisor: Supervisor, *, running: bool = True) -> StatusDocument:
    """The document of this moment. Used under the supervisor's lock."""
    now, unix = time.monotonic(), time.time()
    engines = [_engine(record, unix) for record in supervisor.intake.records.values()]
    workers = [_worker(worker, unix) for worker in supervisor.fleet.all]
    daemon = supervisor.intake.tally.counters()
    findings = supervisor.findings
    open_findings = finding_list(supervisor)
    max_age_idle = supervisor.config.watch.max_age_idle
    problems = find_problems(
        open_findings,
        engines,
        workers,
        unwritten=findings.waiting,
        max_age_idle=max_age_idle,
        uptime=now - supervisor.started,
    )
    first = problems[0] if problems else healthy(engines)
    return StatusDocument(
        status_version=STATUS_VERSION,
        time=unix,
        running=running,
        pid=os.getpid(),
        overall=first.overall,
        meaning=first.meaning,
        action=first.action,
        see=first.see,
        problems=problems,
        max_age_idle=max_age_idle,
        version=__version__,
        config_source=supervisor.source,
        uptime=now - supervisor.started,
        engines=engines,
        workers=workers,
        findings_open=len(open_findings),
        findings=open_findings[:MAX_FINDINGS],
        findings_unwritten=findings.waiting,
        findings_write_failures=findings.write_failures,
        attach_failures=_by_label(daemon, "canaryd_attach_failures_total"),
        messages_rejected=_by_label(daemon, "canaryd_engine_messages_rejected_total"),
    )


def finding_list(supervisor: Supervisor) -> list[FindingStatus]:
    """The open findings, oldest first. Used under the supervisor's lock."""
    unix = time.time()
    return [finding_status(each, unix) for each in supervisor.findings.open]


def finding_status(each: Finding, unix: float) -> FindingStatus:
    """The finding at `unix` seconds."""
    return FindingStatus(
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


def _engine(record: EngineRecord, unix: float) -> EngineStatus:
    counters, gauges = record.tally.counters(), record.gauges

    def gauge(name: str) -> float | None:
        return gauges.get((name, ()))

    def total(name: str) -> int:
        return int(sum(value for key, value in counters.items() if key[0] == name))

    busy = sum(value for key, value in counters.items() if key[0] == "canaryd_gpu_busy_seconds_total")
    watched = _age(record.attached_unix, unix)
    share = (busy - record.busy_before) / watched if watched else None
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
        pass_last_age=_age(gauge("canaryd_pass_last_completion_timestamp_seconds"), unix),
        pass_last_seconds=gauge("canaryd_pass_last_duration_seconds"),
        pass_last_slots=int(gauge("canaryd_pass_last_slots") or 0),
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
        busy_seconds=busy,
        busy_share=share if record.session is not None else None,
        process_visible=bool(record.process) if record.session is not None else None,
        geometry=record.geometry,
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

"""Copies of the supervisor's state for readers: the metrics view."""

from __future__ import annotations

from collections.abc import Iterable

from canaryd.findings import FindingsFile
from canaryd.metrics.collector import MetricsView, OwnerView
from canaryd.metrics.tallies import Key
from canaryd.supervisor.intake import Intake
from canaryd.supervisor.sessions import EngineRecord, State
from canaryd.supervisor.workers import WorkerProcess, WorkerState


def metrics_view(intake: Intake, workers: Iterable[WorkerProcess], findings: FindingsFile) -> MetricsView:
    """A consistent copy of everything exported. Used under the supervisor's lock."""
    open_counts = findings.open_counts()
    daemon = dict(intake.tally.counters())
    daemon["canaryd_findings_write_failures_total", ()] = findings.write_failures
    daemon["canaryd_findings_lost_total", ()] = findings.records_lost
    return MetricsView(
        engines=tuple(_engine(record, open_counts) for record in intake.records.values()),
        workers=tuple(_worker(worker) for worker in workers),
        daemon=OwnerView(
            prefix=(), counters=daemon, gauges={("canaryd_findings_unwritten", ()): float(findings.waiting)}
        ),
    )


def _engine(record: EngineRecord, open_counts: dict[tuple[str, str, str], int]) -> OwnerView:
    gauges: dict[Key, float] = dict(record.gauges)
    for (engine, device, check), count in open_counts.items():
        if (engine, device) == record.key:
            gauges["canaryd_findings_open", (check,)] = count
    if record.last_contact_unix is not None:
        gauges["canaryd_engine_last_contact_timestamp_seconds", ()] = record.last_contact_unix
    if record.described_ratio is not None and record.state is not State.GONE:
        gauges["canaryd_pool_described_ratio", ()] = record.described_ratio
    return OwnerView(
        prefix=record.key,
        counters=record.tally.counters(),
        gauges=gauges,
        histograms=record.tally.histograms(),
        state=record.state.value,
        info=dict(record.info),
    )


def _worker(worker: WorkerProcess) -> OwnerView:
    gauges: dict[Key, float] = dict(worker.gauges)
    gauges["canaryd_worker_up", ()] = float(worker.state is WorkerState.READY)
    return OwnerView(prefix=(worker.device,), counters=worker.tally.counters(), gauges=gauges)

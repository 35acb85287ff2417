"""The models of the status document."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

STATUS_VERSION = 1
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
    pass_last_age: float | None
    pass_last_seconds: float | None
    pass_last_slots: int
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
    busy_share: float | None
    process_visible: bool | None
    geometry: list[dict[str, object]]


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


class Problem(_Model):
    """One thing that is wrong. `code` is stable; `see` leads to its section of the runbook."""

    code: str
    subject: str
    overall: Overall
    meaning: str
    action: str
    see: str


class StatusDocument(_Model):
    """Everything at once; `status_version` rises when a field changes its meaning.

    `time` is when it was made (Unix seconds); `running` is false in what a daemon leaves behind when it is stopped.
    """

    status_version: int
    time: float
    running: bool
    pid: int
    overall: Overall
    meaning: str
    action: str
    see: str
    problems: list[Problem]
    max_age_idle: float
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

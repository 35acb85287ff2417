"""What is wrong, the worst first: pure functions of what the status document shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from canaryd.findings.finding import base_name
from canaryd.status.models import EngineStatus, FindingStatus, Problem, WorkerStatus

RUNBOOK = "docs/runbook.md#"
UNGUARDED_MAX = 0.5
OVERDUE_PERIODS = 2
NOT_CORRUPTION = ("nonfinite",)
"""Checks whose findings alone do not mean that memory is corrupted."""


def find_problems(
    findings: Sequence[FindingStatus],
    engines: Sequence[EngineStatus],
    workers: Sequence[WorkerStatus],
    *,
    unwritten: int,
    max_age_idle: float,
    uptime: float,
) -> list[Problem]:
    """Every problem, the worst first."""
    problems = [*_damage(findings), *(each for worker in workers for each in _worker(worker))]
    if unwritten:
        problems.append(
            _degraded(
                "findings_unwritten",
                "disk",
                f"{unwritten} finding records wait for the disk: a restart now would lose them.",
                "Free space in state_dir.",
                "canarydfindingsunwritten",
            )
        )
    problems += [each for engine in engines for each in _engine(engine, max_age_idle)]
    if not engines:
        problems.append(
            _degraded(
                "nothing_attached",
                "daemon",
                f"No engine is attached, {uptime:.0f} s after the start: nothing is watched.",
                "Start an engine with canaryd's client and the same socket_dir; canaryd doctor checks the rest.",
                "canarydnothingattached",
            )
        )
    return problems


def healthy(engines: Sequence[EngineStatus]) -> Problem:
    """The word when nothing is wrong; it claims no more than was looked at."""
    slots = sum(engine.slots.get("settled", 0) for engine in engines)
    if not slots:
        meaning = "Every engine is attached and idle: no slot holds settled content, so nothing is guarded yet."
    elif any(engine.slots.get("settled") and engine.pass_last_age is None for engine in engines):
        meaning = "No corruption was seen so far; the first pass over the memory is not complete."
    else:
        unguarded = max((engine.unguarded_ratio or 0.0 for engine in engines), default=0.0)
        meaning = (
            f"No corruption stands in the {slots} slots that are compared; "
            f"at most {unguarded:.1%} of an engine's content is unguarded."
        )
    return Problem(code="ok", subject="", overall="ok", meaning=meaning, action="Nothing to do.", see="")


def _degraded(code: str, subject: str, meaning: str, action: str, anchor: str) -> Problem:
    return Problem(
        code=code, subject=subject, overall="degraded", meaning=meaning, action=action, see=f"{RUNBOOK}{anchor}"
    )


def _damage(findings: Sequence[FindingStatus]) -> Iterator[Problem]:
    damage = [each for each in findings if each.check not in NOT_CORRUPTION]
    if damage:
        names = ", ".join(sorted({base_name(each.engine) for each in damage}))
        many = f"{len(damage)} finding{'s' * (len(damage) > 1)} of KV-cache corruption"
        read = sum(1 for each in damage if each.readers)
        now = f"live requests read {read} of the places now" if read else "no live request is known to read them now"
        yield Problem(
            code="corruption",
            subject=names,
            overall="corrupt",
            meaning=f"{many} stand{'s' * (len(damage) == 1)}: replies that read these slots may be wrong; {now}.",
            action=f"Take {names} out of rotation and restart it; canaryd findings ack ID takes what is explained off.",
            see=f"{RUNBOOK}canarydcorruption",
        )
    others = len(findings) - len(damage)
    if others:
        yield _degraded(
            "nonfinite",
            "findings",
            f"{others} findings of NaN or Inf stand: overflow or an input can cause them legally.",
            "canaryd findings list; acknowledge what is explained.",
            "canarydnonfinite",
        )


def _worker(worker: WorkerStatus) -> Iterator[Problem]:
    if worker.selftest_failures:
        yield _degraded(
            "selftest_failing",
            worker.device,
            f"{worker.selftest_failures} self-tests on {worker.device} failed: its silence means nothing.",
            "Run canaryd selftest there and on another device; read the GPU's error counters.",
            "canarydselftestfailing",
        )
    if worker.state != "ready":
        yield _degraded(
            "worker_down",
            worker.device,
            f"The worker of {worker.device} is {worker.state}: pools there are not watched.",
            "Wait for its start; if it stays so, read the daemon's log.",
            "canarydworkerdown",
        )


def _engine(engine: EngineStatus, max_age_idle: float) -> Iterator[Problem]:
    name = f"{engine.engine} on {engine.gpu_uuid}"
    if engine.state == "refused":
        yield _degraded(
            "refused",
            name,
            f"{name} serves unwatched: {engine.refusal}",
            "Change what the refusal names.",
            "canarydattachrefused",
        )
    elif engine.state == "stalled":
        silent = f"{engine.last_contact_age:.0f} s" if engine.last_contact_age is not None else "a while"
        yield _degraded(
            "stalled",
            name,
            f"{name} has said nothing for {silent}; what had settled is still compared.",
            "Look at the engine: it is stopped, hangs, or its client's thread does not run.",
            "canarydenginestalled",
        )
    elif engine.state == "gone":
        yield _degraded(
            "gone",
            name,
            f"{name} has ended: its memory is not watched.",
            "If it should run, see why it ended or does not attach.",
            "canarydenginegone",
        )
    elif engine.state == "attaching":
        yield _degraded(
            "attaching",
            name,
            f"{name} is being attached: it is not watched yet.",
            "Wait; if it stays so, read the daemon's log.",
            "canarydworkerdown",
        )
    if engine.ops_stalled:
        yield _degraded(
            "ops_stalled",
            name,
            f"{engine.ops_stalled} ops of {name} never ended: nothing can be judged.",
            "See whether a step hangs, or the adapter forgets an end.",
            "canarydopsstalled",
        )
    if engine.oldest_unverified_age is not None and engine.oldest_unverified_age > OVERDUE_PERIODS * max_age_idle:
        yield _degraded(
            "pass_overdue",
            name,
            f"A slot of {name} was not compared for {engine.oldest_unverified_age:.0f} s.",
            "Raise watch.max_engine_loss or the promised ages.",
            "canarydpassoverdue",
        )
    if engine.unguarded_ratio is not None and engine.unguarded_ratio > UNGUARDED_MAX:
        yield _degraded(
            "unguarded",
            name,
            f"{engine.unguarded_ratio:.0%} of the content of {name} is unguarded.",
            "See slots by state and the reasons below.",
            "canarydunguarded",
        )

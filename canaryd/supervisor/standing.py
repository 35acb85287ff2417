"""Follow-up of open findings: damage that is overwritten, acknowledgements, and the GPU's counters."""

from __future__ import annotations

from canaryd.control.messages import Explain, Explained
from canaryd.findings import Finding, FindingsFile
from canaryd.findings.acks import taken
from canaryd.logs import event_logger
from canaryd.supervisor.fleet import Fleet
from canaryd.supervisor.gpu_counters import GpuCounters
from canaryd.supervisor.intake import Intake

log = event_logger(__name__)

EVERY_SECONDS = 0.5
_QUESTIONS_PER_ROUND = 16
_IN_MEMORY = ("content", "chain", "token", "position", "nonfinite")
"""Checks whose damage lies in bytes; the others speak of something that happened once."""


class FollowUp:
    """Asks for what may have changed, a bounded number of questions at a time. Used under the supervisor's lock.

    Question numbers are negative: those of the HTTP server are positive.
    """

    def __init__(self, findings: FindingsFile, intake: Intake, fleet: Fleet, counters: GpuCounters) -> None:
        self._findings = findings
        self._intake = intake
        self._fleet = fleet
        self._counters = counters
        self._next_at = 0.0
        self._cursor = 0
        self._number = 0
        self._asked: dict[int, str] = {}

    def turn(self, now: float) -> None:
        """Everything that is due."""
        if now < self._next_at:
            return
        self._next_at = now + EVERY_SECONDS
        for gpu_uuid, since, hardware in self._counters.answers():
            self._findings.note_hardware(gpu_uuid, since, hardware)
        self._take_acks()
        self._ask(now)

    def found(self, finding: Finding) -> None:
        """A finding is new or was raised: read the GPU's counters."""
        self._counters.ask(finding.gpu_uuid, finding.last_seen)

    def _take_acks(self) -> None:
        try:
            with taken(self._findings.folder) as acks:
                for finding in self._findings.acknowledge(acks):
                    log.warning("finding acknowledged", id=finding.id, by=finding.by, note=finding.note)
        except OSError as error:
            log.error("acknowledgements cannot be read", error=error.strerror)

    def _ask(self, now: float) -> None:
        watched = {
            record.key: record.session.token
            for record in self._intake.records.values()
            if record.session is not None and record.session.forwarding
        }
        standing = [
            each
            for each in self._findings.open
            if each.check in _IN_MEMORY and each.standing != "overwritten" and (each.engine, each.gpu_uuid) in watched
        ]
        self._asked.clear()
        if not standing:
            return
        self._cursor %= len(standing)
        chosen = (standing[self._cursor :] + standing[: self._cursor])[:_QUESTIONS_PER_ROUND]
        self._cursor += len(chosen)
        for finding in chosen:
            slots, group = finding.detail.get("slots"), finding.detail.get("group")
            if not slots or group is None:
                continue
            self._number -= 1
            question = Explain(
                request=self._number,
                session=watched[finding.engine, finding.gpu_uuid],
                group=str(group),
                slot=int(slots[0][0]),
            )
            if self._fleet.find(finding.gpu_uuid, now).send(question):
                self._asked[self._number] = finding.id

    def answered(self, message: Explained) -> bool:
        """Whether the answer was to a question of this class."""
        if message.request >= 0:
            return False
        identity = self._asked.pop(message.request, None)
        if identity is not None and message.document is not None:
            state = message.document["state"]
            # A worker that was replaced knows nothing of the slot until it is written again.
            if state == "damaged":
                self._findings.note_standing(identity, "there", int(message.document["rows"]))
            elif state not in ("unknown", "doubt", "suspect"):
                self._findings.note_standing(identity, "overwritten", int(message.document["rows"]))
        return True

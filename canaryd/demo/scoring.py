"""What was injected, what was found, and which finding belongs to which fault. No clock, no sockets.

A finding belongs to a fault if it names a page that the fault touched or a row of a request that it touched, while the
fault stands. It counts as the detection only if its check is one that the class can cause and, for content, only if
it names a slot that the fault changed. What belongs to no fault is a false alarm.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["waiting", "detected", "missed", "unguarded"]


@dataclass
class FaultRecord:
    """One fault as the engine's process reported it. Times are monotonic seconds; `ended` None while it stands."""

    number: int
    name: str
    checks: frozenset[str]
    group: str
    pages: frozenset[int]
    slots: frozenset[int]
    requests: frozenset[str]
    settled: bool
    at: float
    state: State = "waiting"
    detected_at: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Sighting:
    """One finding of the daemon, and when it was first seen."""

    identity: str
    check: str
    group: str
    pages: frozenset[int]
    ranges: tuple[tuple[int, int], ...]
    request: str
    seen: float

    @classmethod
    def of(cls, document: Mapping[str, Any], seen: float) -> Sighting:
        """From one entry of the daemon's `/findings`."""
        detail = document["detail"]
        return cls(
            identity=f"{document['id']} {document['count']}",  # found again at its place, it is news
            check=str(document["check"]),
            group=str(detail.get("group", "")),
            pages=frozenset(int(page) for page in detail.get("pages", ())),
            ranges=tuple((int(first), int(last)) for first, last in detail.get("slots", ())),
            request=str(detail.get("row", "")).rpartition("#")[0],
            seen=seen,
        )


def _belongs(sighting: Sighting, fault: FaultRecord) -> bool:
    stands = fault.at <= sighting.seen and (fault.ended is None or sighting.seen <= fault.ended)
    if not stands or (sighting.group != fault.group and sighting.request not in fault.requests):
        return False
    return bool(sighting.pages & fault.pages) or sighting.request in fault.requests


def _detects(sighting: Sighting, fault: FaultRecord) -> bool:
    if sighting.check not in fault.checks or sighting.group != fault.group:
        return False
    if sighting.check == "content":
        return any(first <= slot <= last for slot in fault.slots for first, last in sighting.ranges)
    return True


@dataclass
class ClassTally:
    """Counts of one class. `injected`: those on settled slots."""

    injected: int = 0
    unguarded: int = 0
    detected: int = 0
    missed: int = 0
    seconds: list[float] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As it stands in the JSON report; seconds to detect, None if nothing was."""
        return {
            "injected": self.injected,
            "unguarded": self.unguarded,
            "detected": self.detected,
            "missed": self.missed,
            "seconds_p50": round(statistics.median(self.seconds), 3) if self.seconds else None,
            "seconds_max": round(max(self.seconds), 3) if self.seconds else None,
        }


class Score:
    """All faults and findings of one run."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.faults: dict[int, FaultRecord] = {}
        self._sightings: dict[str, Sighting] = {}
        self._unexplained: dict[str, Sighting] = {}

    def add(self, fault: FaultRecord) -> None:
        """A fault was injected; findings seen while its report was on the way are looked at again."""
        self.faults[fault.number] = fault
        for sighting in list(self._unexplained.values()):
            self._attribute(sighting)

    def see(self, sighting: Sighting) -> None:
        """A finding of the daemon; one that was seen before changes nothing."""
        if sighting.identity in self._sightings:
            return
        self._sightings[sighting.identity] = sighting
        self._unexplained[sighting.identity] = sighting
        self._attribute(sighting)

    def _attribute(self, sighting: Sighting) -> None:
        for fault in self.faults.values():
            if not _belongs(sighting, fault):
                continue
            self._unexplained.pop(sighting.identity, None)
            if _detects(sighting, fault) and fault.state != "detected":
                fault.state = "detected"
                fault.detected_at = sighting.seen

    def judge(self, number: int, *, stands: bool) -> None:
        """Time is up for a fault: missed if it was on a settled slot and still stands, else unguarded."""
        fault = self.faults[number]
        if fault.state == "waiting":
            fault.state = "missed" if fault.settled and stands else "unguarded"

    @property
    def waiting(self) -> list[FaultRecord]:
        """Faults without a verdict."""
        return [fault for fault in self.faults.values() if fault.state == "waiting"]

    @property
    def findings(self) -> int:
        """Findings seen."""
        return len(self._sightings)

    @property
    def false_alarms(self) -> list[Sighting]:
        """Findings that belong to no fault known so far."""
        return list(self._unexplained.values())

    def tallies(self) -> dict[str, ClassTally]:
        """Counts by class. A fault on a slot that was not settled is unguarded, also if it was found."""
        tallies = {name: ClassTally() for name in self.names}
        for fault in self.faults.values():
            tally = tallies[fault.name]
            if not fault.settled or fault.state == "unguarded":
                tally.unguarded += 1
                continue
            tally.injected += 1
            tally.missed += fault.state == "missed"
            if fault.state == "detected" and fault.detected_at is not None:
                tally.detected += 1
                tally.seconds.append(max(0.0, fault.detected_at - fault.at))
        return tallies

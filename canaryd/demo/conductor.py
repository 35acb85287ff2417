"""Runs the injections of one demo: one command to the engine's process at a time, a few faults standing at once."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable
from typing import Any

from canaryd.demo.classes import CLASSES
from canaryd.demo.daemon import DaemonPages
from canaryd.demo.display import Display
from canaryd.demo.processes import Child, ChildFailed
from canaryd.demo.scoring import FaultRecord, Score, Sighting

STANDING = 6
"""Faults that stand at once."""
ANSWER_SECONDS = 30.0
GRACE_SECONDS = 4.0
"""A finding may still come of a fault so long after it was cleaned up."""
UNSETTLED_SECONDS = 2.0
LOOK_SECONDS = 2.0
"""Between looks whether a settled fault that was not found yet was overwritten or freed by the engine."""
POLL_SECONDS = 0.05


class Conductor:
    """Injects, watches the findings, judges, cleans up.

    Args:
        engine: the engine's process.
        pages: the daemon.
        score: takes everything.
        display: shows it.
        verdict_seconds: time in which a fault on a settled slot must be found.
        rng: order of the classes.
    """

    def __init__(
        self,
        engine: Child,
        pages: DaemonPages,
        score: Score,
        display: Display,
        *,
        verdict_seconds: float,
        rng: random.Random,
        check: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._pages = pages
        self._score = score
        self._display = display
        self._verdict_seconds = verdict_seconds
        self._rng = rng
        self._check = check
        self._number = 0
        self._polled_at = 0.0
        self._look_at: dict[int, float] = {}
        self._cleaned: dict[int, float] = {}
        self._forgotten: set[int] = set()
        self._not_before: dict[str, float] = {}
        self.started = time.monotonic()

    def run(self, seconds: float, more_seconds: float) -> None:
        """Inject for `seconds`; if some class had no fault on a settled slot, only those for `more_seconds` more."""
        end = self.started + seconds
        while time.monotonic() < end:
            self._turn("injecting", self._score.names)
        self._settle()
        end = time.monotonic() + more_seconds
        while time.monotonic() < end and (lacking := self._lacking()):
            self._turn(f"again {', '.join(lacking)}", lacking, prefer_settled=True)
            if not self._lacking():
                self._settle()
        self._settle()

    def watch(self, seconds: float, status: str) -> None:
        """Inject nothing and look for findings."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._poll()
            self._display.update(status, time.monotonic() - self.started)
            time.sleep(POLL_SECONDS)

    def _lacking(self) -> list[str]:
        tallies = self._score.tallies()
        return [name for name in self._score.names if not tallies[name].injected]

    def _settle(self) -> None:
        """Wait until every fault has its verdict and was cleaned up."""
        while self._unclean():
            self._turn("waiting for verdicts", [])

    def _unclean(self) -> list[FaultRecord]:
        return [fault for fault in self._score.faults.values() if fault.number not in self._cleaned]

    def _turn(self, status: str, names: list[str], *, prefer_settled: bool = False) -> None:
        self._poll()
        self._display.update(status, time.monotonic() - self.started)
        if not (self._clean_one() or self._look_at_one() or self._forget_one() or self._inject(names, prefer_settled)):
            time.sleep(POLL_SECONDS)

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._polled_at < POLL_SECONDS:
            return
        self._polled_at = now
        self._check()
        for document in self._pages.findings():
            self._score.see(Sighting.of(document, time.monotonic()))

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command; findings are looked for while the answer is awaited."""
        self._engine.tell(command)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            try:
                answer = self._engine.answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self._poll()
                continue
            if answer["event"] == "error":
                raise ChildFailed(f"the engine's process could not carry out {command}: {answer['why']}")
            return answer
        raise ChildFailed(f"the engine's process did not answer {command}")

    def _inject(self, names: list[str], prefer_settled: bool) -> bool:
        now = time.monotonic()
        ready = [name for name in names if self._not_before.get(name, 0.0) <= now]
        if not ready or len(self._unclean()) >= STANDING:
            return False
        tallies = self._score.tallies()  # a settled fault without a verdict counts as injected
        name = min(ready, key=lambda each: (tallies[each].injected, self._rng.random()))
        self._number += 1
        answer = self._ask({"command": "inject", "class": name, "id": self._number, "prefer_settled": prefer_settled})
        if answer["event"] == "no_target":
            self._not_before[name] = time.monotonic() + 0.5
            return True
        self._score.add(
            FaultRecord(
                number=self._number,
                name=name,
                checks=CLASSES[name],
                group=answer["group"],
                pages=frozenset(answer["pages"]),
                slots=frozenset(answer["slots"]),
                requests=frozenset(answer["requests"]),
                settled=answer["settled"],
                at=answer["at"],
            )
        )
        return True

    def _look_at_one(self) -> bool:
        now = time.monotonic()
        for fault in self._score.waiting:
            if not fault.settled:
                # it may be blessed; if it is found, then soon
                if now - fault.at > UNSETTLED_SECONDS:
                    self._score.judge(fault.number, stands=False)
                    return True
                continue
            if now < self._look_at.get(fault.number, fault.at + LOOK_SECONDS):
                continue
            self._look_at[fault.number] = now + LOOK_SECONDS
            stands = self._ask({"command": "look", "id": fault.number})["stands"]
            if not stands or now - fault.at > self._verdict_seconds:
                self._score.judge(fault.number, stands=stands)
            return True
        return False

    def _clean_one(self) -> bool:
        for fault in self._unclean():
            if fault.state != "waiting":
                self._ask({"command": "clean", "id": fault.number})
                now = time.monotonic()
                self._cleaned[fault.number] = now
                fault.ended = now + GRACE_SECONDS
                return True
        return False

    def _forget_one(self) -> bool:
        now = time.monotonic()
        for number, cleaned in self._cleaned.items():
            if number not in self._forgotten and now - cleaned > GRACE_SECONDS:
                self._ask({"command": "forget", "id": number})
                self._forgotten.add(number)
                return True
        return False

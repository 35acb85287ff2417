"""Findings on their way to the engine: filled by the client's thread, emptied by the engine's. No lock."""

from __future__ import annotations

from collections import deque

from canaryd.wire.messages import Finding


class Inbox:
    """A bounded queue of findings; of too many the oldest are dropped and counted.

    One thread puts; any may take.
    """

    __slots__ = ("_limit", "_waiting", "dropped", "received")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Finding] = deque()
        self.received = 0
        self.dropped = 0

    def put(self, finding: Finding) -> None:
        """Add a finding."""
        self.received += 1
        if len(self._waiting) >= self._limit and self._pop() is not None:
            self.dropped += 1
        self._waiting.append(finding)

    def take(self) -> list[Finding]:
        """Everything that waits, oldest first."""
        found: list[Finding] = []
        while self._waiting:
            finding = self._pop()
            if finding is not None:
                found.append(finding)
        return found

    def _pop(self) -> Finding | None:
        try:
            return self._waiting.popleft()
        except IndexError:  # another thread was faster
            return None

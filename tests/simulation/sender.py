"""The client's thread, its socket and the network, moved by hand and on a simulated clock."""

from __future__ import annotations

import random
from collections import Counter, deque

from canaryd.client.ops import Ops
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.framing import encode
from canaryd.wire.messages import Attach, Attached, Beat, Begin, End, Resync, Snapshot, ToDaemon, ToEngine, WhoAreYou
from tests.simulation.daemon import Daemon
from tests.simulation.features import Features

Frame = tuple[float, bytes, list[bytes], AnnouncePage]

BEAT_SECONDS = 0.1


class Sender:
    """Sends what the client queued. Frames keep their order; a lost one leaves a hole in the numbers."""

    def __init__(self, features: Features, rng: random.Random, ops: Ops, attach: Attach) -> None:
        self.daemon: Daemon | None = None
        self.counts: Counter[str] = Counter()
        self.frames: deque[Frame] = deque()
        self.answers: deque[tuple[float, bytes, ToEngine]] = deque()
        self.calm = False
        self.trace = 0
        self._features = features
        self._rng = rng
        self._ops = ops
        self._attach = attach
        self._session = b""
        self._page: AnnouncePage | None = None
        self._pages: list[AnnouncePage] = []
        self._attached = False
        self._retry_at = 0.0
        self._beat_at = 0.0
        self._sessions = 0
        self._arrives = 0.0

    # --- the thread ---------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """One turn of the thread, or a part of one."""
        self._ops.poll()
        if self._page is None:
            if now >= self._retry_at:
                self._connect(now)
            return
        self._listen(now)
        if self._page is None or not self._attached:
            return
        if self._rng.random() < 0.5:
            self._ops.snapshot_if_idle()
        limit = self._rng.randrange(1, 6)

        def send(number: int, message: Begin | End | Snapshot) -> bool:
            nonlocal limit
            limit -= 1
            if limit < 0:
                return False
            self._put(number, message, now)
            return True

        self._ops.drain(send)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            self._put(self._ops.stream.number, Beat(), now)

    def _connect(self, now: float) -> None:
        self._sessions += 1
        self._session = self._sessions.to_bytes(16, "little")
        self._page = AnnouncePage.create()
        self._pages.append(self._page)
        self._attached = False
        self._put(0, self._attach, now)

    def _listen(self, now: float) -> None:
        while self.answers and self.answers[0][0] <= now:
            _, session, answer = self.answers.popleft()
            if session != self._session or self._page is None:
                continue
            match answer:
                case Attached():
                    self._ops.open_session(self._page)
                    self._attached = True
                case Resync():
                    self._ops.want_snapshot()
                case WhoAreYou():
                    self.drop_session(now)

    def drop_session(self, now: float) -> None:
        """The session is over on this side; the daemon may learn of it later."""
        if self._page is None:
            return
        self._ops.close_session()
        self._page = None
        self._attached = False
        self._session = b""
        self._retry_at = now + 0.2 * self._rng.random()

    @property
    def connected(self) -> bool:
        """Whether a session stands."""
        return self._attached

    # --- the network --------------------------------------------------------------------------------------------------

    def _put(self, number: int, message: ToDaemon, now: float) -> None:
        lossy = self._features.loss and not self.calm and not isinstance(message, Attach)
        if lossy and self._rng.random() < 0.004:
            self.counts["lost"] += 1
            return
        slow = self._features.slow_network and not self.calm and self._rng.random() < 0.05
        delay = self._rng.random() * (0.08 if slow else 0.002)
        self._arrives = max(self._arrives, now + delay)
        assert self._page is not None
        self.frames.append((self._arrives, self._session, encode(self._session, number, message), self._page))

    def answer(self, session: bytes, message: ToEngine, now: float) -> None:
        """An answer of the daemon goes out."""
        self.answers.append((now + 0.002 * self._rng.random(), session, message))

    def close(self) -> None:
        """Unmaps every announce page."""
        self._ops.close_session()
        for page in self._pages:
            page.close()

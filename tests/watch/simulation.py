"""Engine, stream, backend and watch together, interleaved at random: the adversarial schedule."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from canaryd.watch.burst import BurstResult
from canaryd.watch.findings import Finding
from canaryd.watch.policy import Policy
from canaryd.watch.watch import Watch
from tests.watch.engine import PAGE, Engine, Features
from tests.watch.fake_backend import FakeBackend
from tests.watch.harness import SLOT_BYTES, attach_of

STEP_SECONDS = 0.002
POLICY = Policy(tick_seconds=0.02, max_age_live=0.5, max_age_idle=1.0, reread_after=0.005)


class Simulation:
    """`turn()` lets one of the actors move. Nothing orders them but the stream and the announce page."""

    def __init__(
        self,
        seed: int,
        *,
        features: Features | None = None,
        scheme: str = "native",
        policy: Policy = POLICY,
        watch_class: type[Watch] = Watch,
    ) -> None:
        print(f"simulation seed {seed}, scheme {scheme}")
        self.engine = Engine(seed, features)
        self.rng = np.random.default_rng([seed, 1])
        attach = attach_of(self.engine.specs, frees=self.engine.features.frees, tiers="none")
        self.watch = watch_class(
            attach, policy=policy, scheme=scheme, chain_key=seed, slot_bytes=[SLOT_BYTES] * len(self.engine.specs)
        )
        self.backend = FakeBackend(self.engine.memories, [PAGE] * len(self.engine.specs), scheme, seed)
        self.now = 1.0
        self.policy = policy
        self.findings: list[Finding] = []
        self._running: Generator[None, None, BurstResult] | None = None
        self._ran: BurstResult | None = None
        self._announced = 0
        self._next_tick = self.now

    def turn(self) -> None:
        self.now += STEP_SECONDS * float(self.rng.random())
        draw = self.rng.random()
        if draw < 0.4:
            self.engine.step()
        elif draw < 0.7:
            self._deliver()
        else:
            self._work()

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()
            if cause := self.watch.take_resync():
                assert cause in ("attach", "gap")
                self.engine.resync()
            self.findings += self.watch.take_findings()

    def quiesce(self) -> None:
        """The engine stops; everything is delivered and settled."""
        self.engine.features.gaps = False
        self.engine.drop_next = False
        self.engine.frozen = True
        self.engine.drain()
        for _ in range(6):
            while self.engine.outbox:
                self._deliver()
            if self.watch.take_resync():
                self.engine.resync()
            self.work_for(2 * self.policy.tick_seconds)

    def work_for(self, seconds: float) -> None:
        """Only the daemon works."""
        until = self.now + seconds
        while self.now < until:
            self.now += STEP_SECONDS
            self._work()
            self.findings += self.watch.take_findings()

    def _deliver(self) -> None:
        for _ in range(int(self.rng.integers(1, 4))):
            if self.engine.outbox:
                number, message = self.engine.outbox.popleft()
                self.watch.apply(number, message, self.now)

    def _work(self) -> None:
        if self._ran is not None:
            self.watch.on_burst_done(self._ran, self._announced, self.now)
            self._ran = None
        elif self._running is not None:
            try:
                for _ in range(int(self.rng.integers(1, 6))):
                    next(self._running)
            except StopIteration as stop:
                self._running, self._ran = None, stop.value
                self._announced = self.read_announced()
        else:
            due = self.watch.next_due(self.now)
            if self.now < self._next_tick and (due is None or due > self.now):
                return
            if self.now >= self._next_tick:
                self._next_tick = self.now + self.policy.tick_seconds
            burst = self.watch.next_burst(self.now)
            if burst is not None:
                self._running = self.backend.run_slowly(burst, chunk=int(self.rng.integers(1, 20)))

    def read_announced(self) -> int:
        return self.engine.announced

    def settled(self) -> list[tuple[int, int]]:
        """All (group, slot) that a fault must be found in."""
        return [
            (number, slot)
            for number, spec in enumerate(self.engine.specs)
            for slot in range(spec.num_pages * PAGE)
            if self.watch.explain(number, slot, self.now).guarded
        ]

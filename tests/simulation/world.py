"""One seed: engine, device, client's thread, network and daemon, interleaved at random on a simulated clock."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from canaryd.watch.findings import Finding
from canaryd.watch.report import SlotState
from canaryd.wire.messages import Attach, Identity
from canaryd.worker import attachment as worker
from tests.simulation.daemon import SETTINGS, Daemon
from tests.simulation.engine import Engine
from tests.simulation.features import Features
from tests.simulation.memory import FULL, I64, Pool
from tests.simulation.oracle import Oracle
from tests.simulation.sender import Sender
from tests.simulation.tables import break_a_table

TURN_SECONDS = 0.0008
STEPS = 220


@dataclass(kw_only=True)
class Outcome:
    """What one seed did. `problems` must be empty."""

    seed: int
    features: Features
    problems: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    settled: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    max_age: float = 0.0
    trace: int = 0

    def line(self) -> str:
        """The summary: a replay prints the same one."""
        told = " ".join(f"{name}={self.counts[name]}" for name in sorted(self.counts))
        verdict = "ok" if not self.problems else "FAILED"
        faults = f"settled={self.settled.total()} found={self.found.total()}"
        return f"seed {self.seed} {verdict} {told} {faults} trace={self.trace:08x}"


class World:
    """Everything that moves in one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.features = Features.drawn(self.rng)
        self.now = 1.0
        self.pool = Pool(self.features, np.random.default_rng(seed))
        self.engine = Engine(self.features, random.Random(self.rng.getrandbits(64)), self.pool)
        fd = self.pool.exported
        attach = Attach(
            identity=Identity(engine="simulated"),
            engine_kind="simulated",
            engine_version="1",
            client_version="1",
            memories=[replace_fd_index(fd.memory)],
            groups=self.pool.specs(),
            scheme="native",
            frees=self.features.frees,
            tiers="announced" if self.features.loads else "none",
        )
        self.sender = Sender(self.features, random.Random(self.rng.getrandbits(64)), self.engine.ops, attach)
        self.daemon = Daemon(
            self.features,
            random.Random(self.rng.getrandbits(64)),
            self.pool,
            lambda session, message: self.sender.answer(session, message, self.now),
        )
        self.oracle = Oracle(self.pool, random.Random(self.rng.getrandbits(64)))
        self.applied: set[int] = {0}
        self.daemon.on_end = self._end_applied
        self.daemon.on_findings = self._judge
        self.daemon.on_doubt = self.oracle.excuse_all
        self.names = [spec.name for spec in attach.groups]
        self.trace = 0
        self.counts: Counter[str] = Counter()
        self._stopped_until = 0.0
        self._stalled_until = 0.0
        self._detach_at: float | None = None

    def _end_applied(self, op: int) -> None:
        self.applied.add(op)
        self.oracle.applied(op)

    # --- turns --------------------------------------------------------------------------------------------------------

    def turn(self, *, calm: bool = False) -> None:
        """One of the actors moves."""
        rng = self.rng
        self.now += TURN_SECONDS * rng.random()
        draw = rng.random()
        if draw < 0.22:
            if self.now >= self._stopped_until:
                self.engine.turn()
        elif draw < 0.5:
            self.engine.work()
        elif draw < 0.62:
            if self.now >= max(self._stalled_until, self._stopped_until):
                self.sender.turn(self.now)
        elif draw < 0.75:
            self._deliver()
        else:
            self.daemon.work(self.now)
        if not calm:
            self._disturb()
        if self._detach_at is not None and self.now >= self._detach_at:
            self._detach_at = None
            self.daemon.detach()

    def _deliver(self) -> None:
        frames = self.sender.frames
        for _ in range(4):
            if not frames or frames[0][0] > self.now:
                return
            _, _, parts, page = frames.popleft()
            self.trace = zlib.crc32(parts[1], self.trace)
            self.daemon.receive(parts, page, self.now)

    def _judge(self, findings: list[Finding]) -> None:
        self.counts["findings"] += len(findings)
        for finding in findings:
            self.trace = zlib.crc32(f"{finding.check}{finding.slots}".encode(), self.trace)
        self.oracle.judge(findings, self.names, self.now)

    def _disturb(self) -> None:
        rng, features = self.rng, self.features
        if rng.random() > 0.004:
            return
        if features.engine_stops and rng.random() < 0.2:
            self._stopped_until = self.now + rng.random() * 0.3
            self.counts["stops"] += 1
        if features.sender_stalls and rng.random() < 0.4:
            self._stalled_until = self.now + rng.random() * 0.2
            self.counts["stalls"] += 1
        if features.cuts and rng.random() < 0.1:
            self.sender.drop_session(self.now)
            self._detach_at = self.now + rng.random() * 0.25
            self.counts["cuts"] += 1
        if features.worker_restarts and rng.random() < 0.08:
            self.daemon.detach()
            self.counts["restarts"] += 1

    # --- faults -------------------------------------------------------------------------------------------------------

    def settled(self, group: int) -> I64:
        """Slots in which a fault must be found: guarded, and nothing that is under way changes them."""
        attachment = self.daemon.attachment
        if attachment is None or attachment.watch.report(self.now).in_gap:
            return np.zeros(0, dtype=np.int64)
        ledger = attachment.watch.groups[group].ledger
        slots = np.flatnonzero(ledger.state == SlotState.SETTLED)
        slots = slots[~ledger.is_covered(slots)]
        last = self.pool.last_op[self.pool.cells(group, slots)]
        quiet = np.isin(last, np.fromiter(self.applied, dtype=np.int64))
        return slots[quiet]

    def inject(self) -> None:
        """One fault, most of the time in a settled slot."""
        group = self.rng.randrange(len(self.names))
        settled = self.settled(group)
        anywhere = self.rng.random() < 0.1
        if not settled.size and not anywhere:
            return
        if anywhere:
            slot = self.rng.randrange(self.pool.page_sizes[group], self.pool.view(group).shape[0])
        else:
            slot = int(settled[self.rng.randrange(settled.size)])
        references = self.engine.pages.references.get(slot // self.pool.page_sizes[FULL], 0)
        self.oracle.inject(group, slot, self.now, settled=settled, shared=group == FULL and references > 1)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def run(self, steps: int = STEPS) -> Outcome:
        """All of it."""
        rate = 0.003 if self.features.faults else 0.0
        turns = 0
        while self.engine.steps < steps and turns < 100 * steps and not self.oracle.problems:
            turns += 1
            self.turn()
            if self.rng.random() < rate:
                self.inject()
        self._quiesce()
        if self.daemon.attachment is not None and not self.oracle.problems:
            self.daemon.check_books()
        if self.features.faults and not self.oracle.problems and not self.oracle.missed():
            self._break_a_table()
        return self._outcome()

    def _break_a_table(self) -> None:
        """The last op of the engine is faulty, and the daemon must say so; from then on nothing else is judged."""
        if not self._caught_up():
            return
        seen: list[Finding] = []
        self.daemon.on_findings = seen.extend
        fault_class, check = break_a_table(self.engine, self.rng)
        until = self.now + SETTINGS.max_age_live
        while self.now < until:
            self.turn(calm=True)
        self.oracle.tally.injected[fault_class] += 1
        self.oracle.tally.settled[fault_class] += 1
        found = any(finding.check is check for finding in seen)
        self.oracle.tally.found[fault_class] += found
        if not found:
            self.oracle.problems.append(f"missed: {fault_class}, found {sorted({f.check.value for f in seen})}")

    def _quiesce(self) -> None:
        """Disturbances cease, ops end, everything is delivered, and faults are injected into what stands still."""
        self.sender.calm = self.engine.draining = True
        self._stopped_until = self._stalled_until = 0.0
        for _ in range(20000):
            if self.oracle.problems or (self.engine.idle and self._caught_up()):
                break
            self.turn(calm=True)
        else:
            self.oracle.problems.append("the daemon never caught up")
        if self.features.faults:
            for _ in range(2):
                self.inject()
        until = self.now + 2.0 * SETTINGS.max_age_idle
        while self.now < until and not self.oracle.problems:
            self.turn(calm=True)

    def _caught_up(self) -> bool:
        attachment = self.daemon.attachment
        if attachment is None or self.sender.frames or not self.sender.connected or len(self.engine.ops.stream):
            return False
        report = attachment.watch.report(self.now)
        return not report.in_gap and not report.open_ops and not report.pending_stamps and not report.slots["doubt"]

    def _outcome(self) -> Outcome:
        problems = [*self.oracle.problems, *self.daemon.problems]
        if not problems and self.oracle.missed():
            problems.append(f"missed: {[e.fault_class for e in self.oracle.expected.values()]}")
        tally = self.oracle.tally
        counts = self.counts + self.daemon.counts + self.sender.counts
        counts["steps"] = self.engine.steps
        counts["slot_writes"] = self.engine.slot_writes
        counts["missed"] = self.oracle.missed()
        counts["false_alarms"] = sum(problem.startswith("false alarm") for problem in problems)
        counts["shared_settled"], counts["shared_found"] = tally.shared_settled, tally.shared_found
        for why, count in tally.excused.items():
            counts[f"excused_{why}"] = count
        return Outcome(
            seed=self.seed,
            features=self.features,
            problems=problems,
            counts=counts,
            injected=tally.injected,
            settled=tally.settled,
            found=tally.found,
            max_age=tally.max_age,
            trace=self.trace,
        )

    def close(self) -> None:
        """Gives all memory back."""
        if self.daemon.attachment is not None:
            self.daemon.attachment.close()
        self.sender.close()
        self.pool.close()


def replace_fd_index(memory: object) -> object:
    """The description as it travels: descriptor 0 is the announce page, 1 the pool."""
    import msgspec

    return msgspec.structs.replace(memory, fd_index=1)


@contextmanager
def simulated_device(daemon: Daemon) -> Iterator[None]:
    """The worker's attachments run on the daemon's simulated backend."""
    original = worker.make_backend
    worker.make_backend = daemon.make_backend
    try:
        yield
    finally:
        worker.make_backend = original


def run_seed(seed: int, steps: int = STEPS) -> Outcome:
    """The outcome of one seed."""
    world = World(seed)
    try:
        with simulated_device(world.daemon):
            return world.run(steps)
    finally:
        world.close()

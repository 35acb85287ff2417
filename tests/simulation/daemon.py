"""The simulated daemon: the real attachment of a worker, a supervisor reduced to its answers, a slow device."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from canaryd.control.messages import HOST, WorkerSettings
from canaryd.watch.counters import Check
from canaryd.watch.findings import Finding
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.framing import decode_to_daemon
from canaryd.wire.messages import Attach, Attached, Beat, End, Resync, Snapshot, ToEngine, WhoAreYou
from canaryd.worker import attachment as worker
from tests.simulation.backend import SimulatedBackend
from tests.simulation.features import Features
from tests.simulation.memory import Pool

SETTINGS = WorkerSettings(
    device=HOST,
    backend="reference",
    scheme="native",
    nice=0,
    tick=0.02,
    busy_share=1.0,
    max_age_live=0.3,
    max_age_idle=0.6,
    bytes_per_burst=1 << 20,
    selftest_interval=0,
    log_format="text",
    log_level="info",
)

SECOND_READ = (Check.CONTENT, Check.TOKEN, Check.POSITION, Check.CHAIN)
"""Checks whose findings were suspects first."""


class Daemon:
    """At most one attachment. `answer` sends to a session."""

    def __init__(
        self, features: Features, rng: random.Random, pool: Pool, answer: Callable[[bytes, ToEngine], None]
    ) -> None:
        self.attachment: worker.Attachment | None = None
        self.backend: SimulatedBackend | None = None
        self.on_findings: Callable[[list[Finding]], None] = lambda findings: None
        self.on_end: Callable[[int], None] = lambda op: None
        self.on_doubt: Callable[[str], None] = lambda why: None
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._features = features
        self._rng = rng
        self._pool = pool
        self._answer = answer
        self._session = b""
        self._expected_seq = 0
        self._doubts = 0
        self._slot_count = self._confirmed = 0

    # --- frames -------------------------------------------------------------------------------------------------------

    def receive(self, parts: list[bytes], page: AnnouncePage, now: float) -> None:
        """One frame; `page` is what the side connection of its session carried."""
        header, message = decode_to_daemon(parts)
        if isinstance(message, Attach):
            self.detach()
            self._attach(message, page)
            self._session = header.session
            self._answer(header.session, Attached(described_ratio=1.0, scheme="native"))
            self._answer(header.session, Resync(cause="attach"))
            return
        if self.attachment is None or header.session != self._session:
            self._answer(header.session, WhoAreYou())
            return
        if not isinstance(message, Beat):
            hole = header.seq != self._expected_seq + 1
            self._expected_seq = header.seq
        else:
            hole = False
        self.attachment.apply(header.seq, message, now)
        if hole:
            self.counts["gaps"] += 1
            report = self.attachment.watch.report(now)
            if report.in_gap or isinstance(message, Snapshot):
                self.counts["gaps_reported"] += 1
            else:
                self.problems.append(f"a hole before message {header.seq} was not taken as a gap")
        self._after(now)
        if isinstance(message, End):
            self.on_end(message.op)

    def _attach(self, attach: Attach, page: AnnouncePage) -> None:
        fd = self._pool.exported.fd
        assert fd is not None
        self.attachment = worker.Attachment(attach, [page.fd, fd], SETTINGS, lambda launches: None, lambda: None)
        self.attachment.watch.take_resync()
        self._expected_seq = 0
        self._doubts = 0
        self._slot_count = self._confirmed = 0
        self.on_doubt("attach")

    def make_backend(self, layouts: object, *, scheme: str, key: int, **_: object) -> SimulatedBackend:
        """Takes the place of the worker's `make_backend`."""
        pool = self._pool
        memories = [pool.view(group) for group in range(len(pool.page_sizes))]
        self.backend = SimulatedBackend(memories, pool.page_sizes, scheme, key)
        return self.backend

    def detach(self) -> None:
        """The session is over: the mapping is closed."""
        if self.attachment is None:
            return
        self.check_books()
        self.attachment.close()
        self.attachment = self.backend = None
        self.on_doubt("detach")

    # --- the loop -----------------------------------------------------------------------------------------------------

    def work(self, now: float) -> None:
        """One turn of the worker's loop, or of the device."""
        attachment, backend = self.attachment, self.backend
        if attachment is None or backend is None:
            return
        if backend.busy:
            pieces = self._rng.randrange(1, 8)
            backend.advance(1 if self._features.slow_bursts and self._rng.random() < 0.8 else pieces)
            return
        # The device may be done long before the worker looks.
        attachment.fetch(lambda: now)
        attachment.step(now)
        self._after(now)

    def _after(self, now: float) -> None:
        attachment = self.attachment
        assert attachment is not None
        watch = attachment.watch
        cause = watch.take_resync()
        if cause is not None:
            self._answer(self._session, Resync(cause=cause))
        counters = watch.counters
        if counters.gaps + counters.snapshots != self._doubts:
            self._doubts = counters.gaps + counters.snapshots
            self.on_doubt("gap")
        if findings := watch.take_findings():
            self._slot_count += sum(finding.slot_count for finding in findings)
            self._confirmed += sum(finding.slot_count for finding in findings if finding.check in SECOND_READ)
            self.on_findings(findings)

    # --- the books ----------------------------------------------------------------------------------------------------

    def check_books(self) -> None:
        """Every slot that was to be stamped, and every suspect, is accounted for under a reason."""
        attachment, backend = self.attachment, self.backend
        assert attachment is not None
        assert backend is not None
        watch, counters = attachment.watch, attachment.watch.counters
        report = watch.report(0.0)
        if self._slot_count != sum(counters.mismatches.values()):
            self.problems.append(f"findings name {self._slot_count} slots, counters {counters.mismatches}")
        open_stamps = backend.items_launched - counters.stamped - sum(counters.stamps_dropped.values())
        provisional = report.provisional_bursts or attachment._running is not None
        if open_stamps < 0 or (open_stamps and not provisional):
            self.problems.append(f"{open_stamps} stamps are neither final nor dropped under a reason")
        left = counters.suspects - self._confirmed - sum(counters.dismissed.values()) - report.open_suspects
        if left:
            self.problems.append(f"{left} suspects are neither findings nor dismissed under a reason")
        self.counts["stamped"] += counters.stamped
        self.counts["skipped"] += sum(counters.skipped.values())
        self.counts["snapshots"] += counters.snapshots
        self.counts["gap_total"] += counters.gaps

"""The supervisor's main loop: sockets, workers, findings and questions from the HTTP server, in one thread."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import zmq

from canaryd.config import Config
from canaryd.control.messages import (
    HOST,
    Explain,
    Explained,
    Found,
    FromWorker,
    Mapped,
    NeedSnapshot,
    NotMapped,
    Report,
    Unmapped,
    WorkerReport,
)
from canaryd.errors import AttachRefused
from canaryd.findings import FindingsFile
from canaryd.http import NoAnswer
from canaryd.logs import event_logger
from canaryd.metrics.collector import MetricsView
from canaryd.status import StatusDocument, statefile, status_document
from canaryd.supervisor.fleet import STOP_SECONDS, Fleet
from canaryd.supervisor.gpu_counters import GpuCounters
from canaryd.supervisor.greeter import Greeter
from canaryd.supervisor.intake import Intake, IntakeRules
from canaryd.supervisor.sockets import DirectoryLock, EngineSockets, prepare_socket_dir, prepare_state_dir
from canaryd.supervisor.standing import FollowUp
from canaryd.supervisor.views import metrics_view
from canaryd.supervisor.workers import WorkerProcess

log = event_logger(__name__)

TURN_MS = 50
STUCK_SECONDS = 10.0
"""The main loop turns some twenty times a second; without a turn for this long it is stuck."""
_RETRY_SECONDS = 1.0
_MAX_QUESTIONS = 64


class Supervisor:
    """Owns everything but the HTTP server. `run` blocks; the other methods may be called from other threads.

    Args:
        config: the daemon's configuration.
        source: where the configuration came from, for the status document.

    Raises:
        StartError: the directories or sockets cannot be used.
    """

    def __init__(self, config: Config, *, source: str) -> None:
        self.config = config
        self.source = source
        self.started = time.monotonic()
        self.lock = threading.Lock()
        # plain flags: a signal handler may set them at any point of the main thread
        self._stopping = False
        self._forced = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Lives as long as the process: a late signal or question may still write to it."""
        self._turned = time.monotonic()
        self._questions: deque[tuple[Explain, str, Future[dict[str, Any]]]] = deque()
        self._asked: dict[int, Future[dict[str, Any]]] = {}
        self._question_number = 0
        self._retry_at = 0.0
        self._saved_at = -statefile.EVERY_SECONDS
        now = time.monotonic()
        prepare_socket_dir(config.socket_dir)
        prepare_state_dir(config.state_dir)
        self._locks = [DirectoryLock(config.socket_dir, "socket_dir")]
        if config.state_dir != config.socket_dir:
            self._locks.append(DirectoryLock(config.state_dir, "state_dir"))
        self.findings = FindingsFile(
            config.state_dir,
            file_bytes=config.findings.file_bytes,
            files=config.findings.files,
            max_open=config.findings.max_open,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = EngineSockets(self._context, config.socket_dir)
        self.fleet = Fleet(config, now)
        self.intake = Intake(
            rules=IntakeRules(
                max_sessions=config.engines.max_sessions,
                stalled_after=config.engines.stalled_after,
                keep_gone=config.engines.keep_gone,
            ),
            router=self._sockets.router,
            greeter=Greeter(
                self._sockets.side,
                uids=frozenset({os.geteuid(), *config.peers.uids}),
                max_sessions=config.engines.max_sessions,
            ),
            findings=self.findings,
            find_worker=self.fleet.find,
        )
        self.intake.adopt_open_findings(now)
        self._counters = GpuCounters([each.device for each in self.fleet.all if each.device != HOST])
        self._follow_up = FollowUp(self.findings, self.intake, self.fleet, self._counters)

    # --- for other threads ------------------------------------------------------------------------------------------

    def metrics(self) -> MetricsView:
        """A copy of everything that is exported."""
        with self.lock:
            return metrics_view(self.intake, self.fleet.all, self.findings)

    def status(self) -> StatusDocument:
        """The status document."""
        with self.lock:
            return status_document(self)

    def is_turning(self) -> bool:
        """Whether the main loop came around lately."""
        return time.monotonic() - self._turned < STUCK_SECONDS

    def not_ready(self) -> list[str]:
        """Why the daemon is not ready; empty if it is."""
        with self.lock:
            return ["shutting down"] if self._stopping else self.fleet.missing()

    def explain(self, engine: str, group: str, slot: int, timeout: float) -> dict[str, Any]:
        """What the engine's worker knows of one slot.

        Raises NoAnswer if the engine, group or slot does not exist, or no answer came in `timeout` seconds.
        """
        answer: Future[dict[str, Any]] = Future()
        with self.lock:
            attached = [each for each in self.intake.records.values() if each.session is not None]
            record = next((each for each in attached if each.label == engine), None)
            if record is None or record.session is None or not record.session.forwarding:
                known = ", ".join(repr(each.label) for each in attached) or "none"
                raise NoAnswer(404, f"no engine {engine!r} is attached; attached: {known}")
            if self._stopping:
                raise NoAnswer(503, "the daemon shuts down")
            if len(self._questions) + len(self._asked) >= _MAX_QUESTIONS:
                raise NoAnswer(503, "too many questions wait for an answer")
            self._question_number += 1
            number = self._question_number
            question = Explain(request=number, session=record.session.token, group=group, slot=slot)
            self._questions.append((question, record.device, answer))
        self._wake_up()
        try:
            return answer.result(timeout)
        except TimeoutError as error:
            raise NoAnswer(504, f"the worker did not answer in {timeout:g} s") from error
        finally:
            with self.lock:
                self._asked.pop(number, None)

    def stop(self) -> None:
        """End `run` soon; a second call ends it now. Safe in a signal handler."""
        self._forced = self._stopping
        self._stopping = True
        self._wake_up()

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called, then shut down."""
        log.info("listening for engines", socket_dir=self.config.socket_dir)
        self._counters.start()
        more = False
        try:
            while not self._stopping:
                self._poll(0 if more else TURN_MS)
                with self.lock:
                    more = self._turn(time.monotonic())
        finally:
            self._shut_down()

    def _poll(self, timeout_ms: int) -> None:
        poller = zmq.Poller()
        poller.register(self._sockets.router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        for descriptor in self.intake.descriptors():
            poller.register(descriptor, zmq.POLLIN)
        for worker in self.fleet.all:
            if worker.channel is not None:
                events = zmq.POLLIN | (zmq.POLLOUT if worker.channel.wants_write else 0)
                poller.register(worker.channel.fileno(), events)
        for ready, _events in poller.poll(timeout_ms):
            if ready == self._wake:
                os.eventfd_read(self._wake)

    def _turn(self, now: float) -> bool:
        """One turn under the lock; whether more frames wait already."""
        self._turned = now
        self.intake.serve_side(now)
        more = self.intake.serve_frames(now)
        self.fleet.turn(now, handle=self._handle, lost=self.intake.worker_lost)
        self.intake.tick(now)
        self._ask()
        self._follow_up.turn(now)
        if now - self._saved_at >= statefile.EVERY_SECONDS:
            self._save_status(now, running=True)
        if self.findings.waiting and now >= self._retry_at:
            self._retry_at = now + _RETRY_SECONDS
            self.findings.flush()
        return more

    def _save_status(self, now: float, *, running: bool) -> None:
        self._saved_at = now
        try:
            statefile.write(self.config.state_dir, status_document(self, running=running).model_dump_json())
        except OSError as error:
            log.warning("the state file is not written", error=error.strerror)

    def _ask(self) -> None:
        while self._questions:
            question, device, answer = self._questions.popleft()
            try:
                sent = self.fleet.find(device, self._turned).send(question)
            except AttachRefused:
                sent = False
            if sent:
                self._asked[question.request] = answer
            else:
                answer.set_exception(NoAnswer(503, "the engine's worker is being started"))

    def _handle(self, worker: WorkerProcess, message: FromWorker) -> None:
        match message:
            case Mapped():
                self.intake.mapped(message)
            case NotMapped():
                self.intake.not_mapped(message)
            case Unmapped():
                worker.unmapped(message.session)
                self.intake.unmapped(message.session)
            case NeedSnapshot():
                self.intake.need_snapshot(message)
            case Found():
                self._record_findings(message)
            case Report():
                self.intake.report(message)
            case WorkerReport():
                worker.tally.report(worker.source, message.counters)
                worker.gauges = {(each.name, each.labels): each.value for each in message.gauges}
                worker.rss_bytes = message.rss_bytes
            case Explained() if self._follow_up.answered(message):
                pass
            case Explained():
                asked = self._asked.pop(message.request, None)
                if asked is not None:
                    _answer(asked, message)

    def _record_findings(self, message: Found) -> None:
        owner = self.intake.owner_of(message.session)
        if owner is None:
            log.warning("a finding of an unknown session", count=len(message.findings))
            return
        record, process = owner
        touched = self.findings.record_opened(
            (record.label, record.device, check, process, detail) for check, detail in message.findings
        )
        for finding in {each.id: each for each in touched}.values():  # a storm that was joined is one line
            self._follow_up.found(finding)
            log.error(
                "corruption found",
                id=finding.id,
                count=finding.count + finding.joined,
                engine=record.label,
                device=record.device,
                check=finding.check,
                group=finding.detail.get("group"),
                pages=finding.detail.get("pages"),
                kind=finding.detail.get("classification"),
            )
        # the detail as reported: that of a finding which others were joined to names its own pages only
        for finding, (check, detail) in zip(touched, message.findings, strict=True):
            self.intake.tell_finding(message.session, finding.id, check, detail)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        log.info("shutting down")
        with self.lock:
            for answer in [*self._asked.values(), *(answer for _question, _device, answer in self._questions)]:
                answer.set_exception(NoAnswer(503, "the daemon shuts down"))
            self._asked.clear()
            self._questions.clear()
            self.fleet.ask_to_stop()
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and not self._forced and not self.fleet.have_ended():
            with self.lock:
                self.fleet.drain(self._handle)
            time.sleep(0.01)
        self._counters.stop()
        with self.lock:
            self._save_status(time.monotonic(), running=False)
        self.close()
        log.info("ended")

    def close(self) -> None:
        """Let go of everything; `run` does it by itself."""
        with self.lock:
            self.fleet.finish()
            self.intake.close()
            self._sockets.close()
            self._context.term()
            self.findings.close()
            for lock in self._locks:
                lock.close()


def _answer(answer: Future[dict[str, Any]], message: Explained) -> None:
    if message.document is not None:
        answer.set_result(message.document)
    else:
        answer.set_exception(NoAnswer(404, message.error or "nothing is known of this slot"))

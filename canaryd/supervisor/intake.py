"""What engines send: side connections, attachments and the frames of the stream. Nothing is acted on unproven."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from canaryd.control.messages import Detach, Frame, Map, Mapped, NeedSnapshot, NotMapped, Report
from canaryd.errors import AttachRefused, RefusalReason, UnknownSession, WireError
from canaryd.findings import FindingsFile
from canaryd.logs import event_logger
from canaryd.metrics.tallies import Tally
from canaryd.supervisor.greeter import Greeter, refusal_answer
from canaryd.supervisor.sessions import (
    EngineRecord,
    Session,
    State,
    device_of,
    geometry_of,
    info_of,
    label_of,
    process_key,
)
from canaryd.supervisor.workers import WorkerProcess
from canaryd.wire import framing, limits
from canaryd.wire.messages import Attach, Attached, Beat, Finding, Rejected, Resync, ToEngine, WhoAreYou

log = event_logger(__name__)

FRAMES_PER_TURN = 512
_MAX_RECORDS_PER_SESSION = 4


@dataclass(frozen=True, kw_only=True)
class IntakeRules:
    """How many may attach, and when silence counts; seconds."""

    max_sessions: int
    stalled_after: float
    keep_gone: float


@dataclass
class Intake:
    """Sessions and engine records, and the only code that changes them. Used under the supervisor's lock.

    `find_worker` gives the worker of a device, or raises AttachRefused.
    """

    rules: IntakeRules
    router: zmq.Socket[bytes]
    greeter: Greeter
    findings: FindingsFile
    find_worker: Callable[[str, float], WorkerProcess]
    tally: Tally = field(default_factory=Tally)
    sessions: dict[bytes, Session] = field(default_factory=dict)
    leaving: dict[bytes, tuple[EngineRecord, str]] = field(default_factory=dict)
    records: dict[tuple[str, str], EngineRecord] = field(default_factory=dict)

    def adopt_open_findings(self, now: float) -> None:
        """At start: engines of an earlier run whose findings still stand are known, as gone, until they return."""
        for finding in self.findings.open:
            key = (finding.engine, finding.gpu_uuid)
            record = self.records.setdefault(key, EngineRecord(*key, ended=now, was_attached=True))
            record.process = finding.process

    def descriptors(self) -> list[int]:
        """Descriptors to poll, besides the router's."""
        return [
            *self.greeter.descriptors(),
            *(each.side.fileno() for each in self.sessions.values()),
        ]

    # --- side connections -------------------------------------------------------------------------------------------

    def serve_side(self, now: float) -> None:
        """Accept, greet, and see which engines died."""
        for side, hello, fds in self.greeter.serve(now, self.sessions, refused=self._count_refusal, bad=self._reject):
            session = Session(hello.session, side, fds, process_key(side.peer.pid), last_contact=now)
            self.sessions[hello.session] = session
        for session in [each for each in self.sessions.values() if each.side.peer_is_gone()]:
            self.end_session(session, "the engine's process ended or hung up", now)

    def end_session(self, session: Session, cause: str, now: float) -> None:
        """Forget the session: its worker unmaps the pool at once."""
        self.sessions.pop(session.token, None)
        record = session.engine
        if record is not None and record.session is session:
            self._detach(record, session, cause, now)
            if record.state is not State.REFUSED:
                self._enter(record, State.GONE, cause)
            record.ended = now
            record.end_seen = not session.sent_away
            record.session = None
        session.close()

    def _detach(self, record: EngineRecord, session: Session, cause: str, now: float) -> None:
        if not session.forwarding:
            return
        session.forwarding = False
        record.stamps_at_end = record.stop_watching()
        # What the worker still says of this session counts until it confirms the end.
        self.leaving[session.token] = (record, session.process)
        try:
            worker = self.find_worker(record.device, now)
        except AttachRefused:
            self.unmapped(session.token)  # no worker, no mapping
            return
        if worker.send(Detach(session=session.token, cause=cause), force=True):
            worker.expect_unmapped(session.token, now)
        else:
            self.unmapped(session.token)

    # --- frames -----------------------------------------------------------------------------------------------------

    def serve_frames(self, now: float) -> bool:
        """Take frames from the router, at most `FRAMES_PER_TURN`; whether more may wait."""
        for _ in range(FRAMES_PER_TURN):
            try:
                peer, *parts = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._take_frame(peer, parts, now)
        return True

    def _take_frame(self, peer: bytes, parts: list[bytes], now: float) -> None:
        header = framing.Header(bytes(limits.SESSION_BYTES), 0)
        try:
            if parts:
                header = framing.parse_header(parts[0])
            header, message = framing.decode_to_daemon(parts)
            if isinstance(message, Attach):
                self._take_attach(peer, header.session, message, parts[1], now)
                return
            session = self.sessions.get(header.session)
            if session is None or session.engine is None or not (session.forwarding or session.waiting):
                raise UnknownSession("this session is not attached; attach again")
            session.check_order(header.seq, message)
        except UnknownSession as error:
            self._reject(error)
            self._send(peer, header.session, WhoAreYou())
            return
        except WireError as error:
            self._reject(error)
            self._send(peer, header.session, Rejected(seq=header.seq, reason=error.reason, detail=str(error)[:1000]))
            return
        record = session.engine
        session.last_contact = now
        record.last_contact_unix = time.time()
        record.tally.count("canaryd_engine_messages_total", type(message).__struct_config__.tag)  # type: ignore[arg-type]
        if record.state is State.STALLED:
            self._enter(record, State.ATTACHED, "it speaks again")
        forwarded = session.forwarding and self._worker_send(
            record, Frame(session=session.token, seq=header.seq, body=parts[1]), now
        )
        if not forwarded and not isinstance(message, Beat):
            record.tally.count("canaryd_engine_frames_dropped_total")

    def _worker_send(self, record: EngineRecord, frame: Frame, now: float) -> bool:
        try:
            return self.find_worker(record.device, now).send(frame)
        except AttachRefused:
            return False

    def _reject(self, error: WireError) -> None:
        self.tally.count("canaryd_engine_messages_rejected_total", error.reason)
        log.debug("frame rejected", reason=error.reason, detail=str(error))

    def _send(self, peer: bytes, token: bytes, answer: ToEngine) -> None:
        try:
            self.router.send_multipart([peer, *framing.encode(token, 0, answer)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("an answer could not be sent", error=str(error))

    # --- attaching --------------------------------------------------------------------------------------------------

    def _take_attach(self, peer: bytes, token: bytes, attach: Attach, body: bytes, now: float) -> None:
        self.tally.count("canaryd_attach_attempts_total")
        label = label_of(attach.identity)
        if token not in self.sessions:
            self.serve_side(now)  # its hello may lie in the listener's backlog
        try:
            session = self.sessions.get(token)
            if session is None:
                raise AttachRefused(
                    RefusalReason.NO_SIDE_CONNECTION,
                    "The session has no side connection, so the engine's death could not be seen.",
                    "Connect side.sock with the same session first.",
                )
            session.peer = peer
            self._attach(session, label, attach, body, now)
        except AttachRefused as refusal:
            self._count_refusal(refusal, label)
            self._send(peer, token, refusal_answer(refusal))

    def _attach(self, session: Session, label: str, attach: Attach, body: bytes, now: float) -> None:
        if session.engine is not None:
            raise AttachRefused(
                RefusalReason.IDENTITY_TAKEN, "The session has attached before.", "Begin a new session to attach again."
            )
        for other in self.sessions.values():
            if other is not session and other.engine is not None and other.engine.label == label:
                raise AttachRefused(
                    RefusalReason.IDENTITY_TAKEN,
                    f"A living engine is attached as {label!r}.",
                    "Give each engine its own name, and each rank its own numbers.",
                )
        record = self._record(label, device_of(attach), now)
        session.engine = record
        record.session, record.ended, record.refusal = session, None, ""
        record.info, record.geometry = info_of(attach), geometry_of(attach)
        record.last_contact_unix = time.time()
        session.last_contact = now
        self._close_findings_of_earlier(record, session.process)
        if session.process and session.process == record.process:
            record.lose(record.stamps_at_end, "the same process began a new session")
        record.process, record.end_seen, record.stamps_at_end = session.process, False, 0
        record.tally.count("canaryd_engine_messages_total", "attach")
        self._enter(record, State.ATTACHING, "it asked for it")
        session.waiting = body
        try:
            self._hand_over(session, record, now)
        except AttachRefused as refusal:
            session.waiting = None
            self._refuse(record, refusal)
            raise

    def _hand_over(self, session: Session, record: EngineRecord, now: float) -> None:
        """Give a waiting attachment to its worker; it waits on if no process runs. Raises AttachRefused if there is no
        such worker."""
        if session.waiting is None:
            return
        message = Map(session=session.token, engine=record.label, body=session.waiting)
        if self.find_worker(record.device, now).send(message, session.fds):
            session.waiting = None
            session.forwarding = True

    def _record(self, label: str, device: str, now: float) -> EngineRecord:
        record = self.records.get((label, device))
        if record is None:
            if len(self.records) >= _MAX_RECORDS_PER_SESSION * self.rules.max_sessions:
                ended = [each for each in self.records.values() if each.ended is not None]
                if ended:
                    self._forget(min(ended, key=lambda each: each.ended or now), "too many engines are known")
            record = self.records[label, device] = EngineRecord(label, device)
        return record

    def _close_findings_of_earlier(self, record: EngineRecord, process: str) -> None:
        """Findings speak of one process's memory: they end when another one attaches under its name."""
        another = record.end_seen and not process  # a process that cannot be identified, after one that ended
        closed = self.findings.close_where(
            lambda each: (each.engine, each.gpu_uuid) == record.key and (each.process != process or another),
            cause="the engine was restarted",
        )
        if closed:
            log.info("findings closed", engine=record.label, count=closed, cause="the engine was restarted")

    def _refuse(self, record: EngineRecord, refusal: AttachRefused) -> None:
        record.refusal = f"{refusal.cause} {refusal.remedy}"
        self._enter(record, State.REFUSED, record.refusal)

    def _count_refusal(self, refusal: AttachRefused, engine: str = "?") -> None:
        self.tally.count("canaryd_attach_failures_total", refusal.refusal.value)
        log.warning("attachment refused", engine=engine, reason=refusal.refusal.value, detail=str(refusal))

    # --- what workers say -------------------------------------------------------------------------------------------

    def mapped(self, message: Mapped) -> None:
        """The worker attached the pool: tell the client, and ask for a snapshot."""
        session = self.sessions.get(message.session)
        if session is None or session.engine is None:
            return
        record = session.engine
        record.info["scheme"] = message.scheme
        record.described_ratio = message.described_ratio
        record.slots, record.size = message.slots, message.size
        record.was_attached, record.attached_unix = True, time.time()
        record.busy_before = record.tally.total("canaryd_gpu_busy_seconds_total")
        self._enter(record, State.ATTACHED, f"{message.slots} slots, {message.size} bytes")
        self._send(
            session.peer, session.token, Attached(described_ratio=message.described_ratio, scheme=message.scheme)
        )
        self._send(session.peer, session.token, Resync(cause="attached"))

    def not_mapped(self, message: NotMapped) -> None:
        """The worker refused the pool."""
        session = self.sessions.get(message.session)
        if session is None or session.engine is None:
            return
        session.forwarding, session.waiting = False, None
        refused = message.refused
        refusal = AttachRefused(RefusalReason(refused.reason), refused.cause, refused.remedy)
        self._count_refusal(refusal, session.engine.label)
        self._refuse(session.engine, refusal)
        self._send(session.peer, session.token, refused)

    def unmapped(self, token: bytes) -> None:
        """The worker has let go of an ended session, or is no more."""
        left = self.leaving.pop(token, None)
        if left is not None:
            left[0].tally.retire(token)

    def owner_of(self, token: bytes) -> tuple[EngineRecord, str] | None:
        """The engine and process of a session that is watched, or was until a moment ago."""
        session = self.sessions.get(token)
        if session is not None and session.engine is not None and session.forwarding:
            return session.engine, session.process
        return self.leaving.get(token)

    def report(self, message: Report) -> None:
        """What a session's counters stand at. One that is leaving has counters still, but no gauges."""
        owner = self.owner_of(message.session)
        if owner is None:
            return
        record, _process = owner
        record.tally.report(message.session, message.counters, message.distributions)
        if message.session not in self.leaving:
            record.gauges = {(each.name, each.labels): each.value for each in message.gauges}

    def tell_finding(self, token: bytes, identity: str, check: str, detail: dict[str, Any]) -> None:
        """Tell the engine of a finding, so that it can end the readers of what is damaged."""
        session = self.sessions.get(token)
        if session is None:
            return
        finding = Finding(
            id=identity,
            check=check,
            group=str(detail["group"]),
            slots=[(int(first), int(last)) for first, last in detail["slots"][: limits.MAX_FINDING_RANGES]],
            slot_count=int(detail["slot_count"]),
            row=str(detail["row"]),
        )
        self._send(session.peer, session.token, finding)

    def need_snapshot(self, message: NeedSnapshot) -> None:
        """The worker's core lost track."""
        session = self.sessions.get(message.session)
        if session is not None:
            log.info("snapshot asked for", engine=session.engine.label if session.engine else "?", cause=message.cause)
            self._send(session.peer, session.token, Resync(cause=message.cause))

    def worker_lost(self, device: str) -> None:
        """The device's worker is replaced: its clients are told to attach again."""
        for token in [token for token, (record, _process) in self.leaving.items() if record.device == device]:
            self.unmapped(token)
        for session in list(self.sessions.values()):
            record = session.engine
            if record is None or record.device != device or not session.forwarding:
                continue
            session.forwarding, session.sent_away = False, True
            record.lose(record.stop_watching(), "its worker is replaced")
            record.tally.retire(session.token)
            self._enter(record, State.ATTACHING, "its worker is replaced")
            self._send(session.peer, session.token, WhoAreYou())

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Silence and retention."""
        for session in self.sessions.values():
            record = session.engine
            if record is not None and session.waiting is not None:
                self._hand_over(session, record, now)
            silent = now - session.last_contact > self.rules.stalled_after
            if record is not None and record.state is State.ATTACHED and silent:
                self._enter(record, State.STALLED, f"nothing was heard for {self.rules.stalled_after:g} s")
        for record in list(self.records.values()):
            if record.ended is not None and now - record.ended > self.rules.keep_gone:
                self._forget(record, "the engine is gone")

    def _forget(self, record: EngineRecord, cause: str) -> None:
        del self.records[record.key]
        closed = self.findings.close_where(lambda each: (each.engine, each.gpu_uuid) == record.key, cause=cause)
        log.info("engine forgotten", engine=record.label, device=record.device, findings_closed=closed, cause=cause)

    @staticmethod
    def _enter(record: EngineRecord, state: State, why: str) -> None:
        if record.state is not state:
            record.state = state
            log.info(f"engine {state.value}", engine=record.label, device=record.device, why=why)

    def close(self) -> None:
        """Hang up on everyone: clients look for the next daemon."""
        self.greeter.close()
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()

"""The worker's main loop: messages in, one burst per tick and attachment, findings and reports out."""

from __future__ import annotations

import select
import time
from collections import Counter
from typing import Any, NoReturn

import msgspec
import torch
from canary_kernels import KernelArgumentError, Scheme, set_validation_observer

from canaryd.backend.selftest import SelfTest
from canaryd.control import messages as control
from canaryd.control.channel import Channel, ChannelClosed
from canaryd.control.messages import (
    HOST,
    Detach,
    Explain,
    Explained,
    Found,
    Frame,
    FromWorker,
    Map,
    Mapped,
    NeedSnapshot,
    NotMapped,
    Ping,
    Pong,
    Ready,
    Report,
    Series,
    Slow,
    Stop,
    ToWorker,
    Unmapped,
    WorkerReport,
    WorkerSettings,
)
from canaryd.errors import AttachRefused, BackendError
from canaryd.logs import event_logger
from canaryd.wire.messages import Attach, Refused
from canaryd.wire.side import close_fds
from canaryd.worker.attachment import Attachment, stream_decoder
from canaryd.worker.reports import counter_series, distributions, gauge_series, slot_document

log = event_logger(__name__)

REPORT_SECONDS = 0.25
LONGEST_SLEEP = 0.05
_HOST_FAILURES_IN_A_ROW = 3


class DeviceLost(Exception):
    """The device failed in a way after which this process can do nothing more with it."""


class Worker:
    """One device's worker. `run` blocks until the supervisor stops it or is gone."""

    def __init__(self, settings: WorkerSettings, channel: Channel) -> None:
        self._settings = settings
        self._channel = channel
        self._decoder = stream_decoder()
        self._attach_decoder = msgspec.msgpack.Decoder(Attach)
        self._attachments: dict[bytes, Attachment] = {}
        self._launches: Counter[str] = Counter()
        self._refused_launches: Counter[tuple[str, str, str]] = Counter()
        self._selftests: dict[Scheme, SelfTest] = {}
        self._selftest_at = 0.0
        self._selftest_runs = 0
        self._selftest_failures = 0
        self._selftest_success: float | None = None
        self._selftest_launches: Counter[str] = Counter()
        self._failures = 0
        self._failures_in_a_row = 0
        self._report_at = 0.0
        self._stopped = False

    def run(self) -> int:
        """Serve; the process's exit status."""
        try:
            self._prepare()
            while not self._stopped:
                self._wait()
                self._turn()
        except ChannelClosed:
            log.info("the supervisor is gone", device=self._settings.device)
        except DeviceLost as lost:
            log.error("the device is lost to this worker", device=self._settings.device, error=str(lost))
            return 1
        finally:
            for attachment in self._attachments.values():
                attachment.close()
            set_validation_observer(None)
        return 0

    def _prepare(self) -> None:
        torch.set_num_threads(1)  # more would take the engine's cores
        set_validation_observer(self._count_refused_launch)
        description = "host memory"
        if self._settings.device != HOST:
            try:
                # The context is made now, before engines measure how much memory is free.
                torch.zeros(1, device="cuda")
                description = torch.cuda.get_device_name()
            except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
                raise DeviceLost(f"no CUDA context: {error}") from error
        self._watch_scheme(self._settings.scheme)
        self._test_itself()
        backend = self._settings.backend or ("reference" if self._settings.device == HOST else "triton")
        self._send(Ready(backend=backend, description=description))

    def _count_refused_launch(self, error: KernelArgumentError) -> None:
        self._refused_launches[error.kernel, error.argument, error.check] += 1

    # --- the self-test ----------------------------------------------------------------------------------------------

    def _watch_scheme(self, scheme: Scheme) -> None:
        """From now on the self-test proves this scheme too."""
        if scheme not in self._selftests:
            device = "cpu" if self._settings.device == HOST else "cuda"
            self._selftests[scheme] = SelfTest(device=device, scheme=scheme, backend=self._settings.backend)
            self._selftest_at = 0.0

    def _test_itself(self) -> None:
        self._selftest_at = time.monotonic() + self._settings.selftest_interval
        self._selftest_runs += 1
        reports = [test.run() for test in self._selftests.values()]
        for report in reports:
            self._selftest_launches.update(report.launches)
            for failure in report.failures:
                log.error("the self-test failed", device=self._settings.device, failure=failure, seed=report.seed)
        if all(report.passed for report in reports):
            self._selftest_success = time.time()
        else:
            self._selftest_failures += 1

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        now = time.monotonic()
        wake = min((each.next_at(now) for each in self._attachments.values()), default=now + LONGEST_SLEEP)
        poller = select.poll()
        poller.register(self._channel, select.POLLIN | (select.POLLOUT if self._channel.wants_write else 0))
        poller.poll(max(0.0, min(LONGEST_SLEEP, wake - now)) * 1000)

    def _turn(self) -> None:
        self._channel.flush()
        for body, fds in self._channel.receive():
            try:
                self._handle(control.decode_to_worker(body), fds)
            finally:
                close_fds(fds)
        for session, attachment in list(self._attachments.items()):
            self._step(attachment)
            self._say_findings(session, attachment)
            cause = attachment.watch.take_resync()
            if cause is not None:
                self._send(NeedSnapshot(session=session, cause=cause))
            now = time.monotonic()
            if now >= attachment.report_at:
                self._report(session, attachment)
        if time.monotonic() >= self._selftest_at:
            self._test_itself()
        if time.monotonic() >= self._report_at:
            self._report_worker()

    def _step(self, attachment: Attachment) -> None:
        try:
            attachment.step(time.monotonic())
            attachment.fetch(time.monotonic)
        except BackendError as error:
            self._failures += 1
            self._failures_in_a_row += 1
            log.error("a burst failed", device=self._settings.device, error=str(error))
            if self._settings.device != HOST or self._failures_in_a_row >= _HOST_FAILURES_IN_A_ROW:
                self._lose_device(error)
            return
        self._failures_in_a_row = 0

    def _lose_device(self, error: BackendError) -> NoReturn:
        """A failed kernel poisons the CUDA context for all that follows in this process."""
        self._report_worker()
        self._channel.flush()
        raise DeviceLost(str(error)) from error

    # --- messages ---------------------------------------------------------------------------------------------------

    def _send(self, message: FromWorker) -> None:
        # Findings and answers must not be lost; what is sent is bounded by what the core bounds.
        self._channel.send(control.encode(message), force=True)

    def _say_slow(self) -> None:
        self._send(Slow())
        self._channel.flush()

    def _handle(self, message: ToWorker, fds: list[int]) -> None:
        match message:
            case Ping():
                self._send(Pong(number=message.number))
            case Frame():
                attachment = self._attachments.get(message.session)
                decoded = self._decoder.decode(message.body)
                if attachment is not None:
                    attachment.apply(message.seq, decoded, time.monotonic())
            case Map():
                self._map(message, fds)
            case Detach():
                self._detach(message)
            case Explain():
                self._explain(message)
            case Stop():
                self._stopped = True

    def _map(self, message: Map, fds: list[int]) -> None:
        attach = self._attach_decoder.decode(message.body)
        try:
            attachment = Attachment(
                attach,
                fds,
                self._settings,
                count_launches=self._launches.update,
                before_compiling=self._say_slow,
            )
        except AttachRefused as refusal:
            self._send(
                NotMapped(
                    session=message.session,
                    refused=Refused(reason=refusal.refusal.value, cause=refusal.cause, remedy=refusal.remedy),
                )
            )
            if isinstance(refusal.__cause__, BackendError):
                self._failures += 1
                if self._settings.device != HOST and not device_answers():
                    self._lose_device(refusal.__cause__)
            return
        self._attachments[message.session] = attachment
        self._watch_scheme(attachment.scheme)
        attachment.watch.take_resync()  # the supervisor asks for the first snapshot when it tells the client
        self._send(
            Mapped(
                session=message.session,
                described_ratio=attachment.described_ratio,
                scheme=attachment.scheme,
                slots=attachment.slots,
                size=attachment.size,
            )
        )

    def _detach(self, message: Detach) -> None:
        attachment = self._attachments.pop(message.session, None)
        if attachment is not None:
            self._say_findings(message.session, attachment)
            self._report(message.session, attachment)
            attachment.close()
            log.info("unmapped", device=self._settings.device, cause=message.cause)
        self._send(Unmapped(session=message.session))

    def _explain(self, message: Explain) -> None:
        attachment = self._attachments.get(message.session)
        document: dict[str, Any] | None = None
        error = None
        if attachment is None:
            error = "the engine is being attached"
        else:
            try:
                report = attachment.explain(message.group, message.slot, time.monotonic())
                document = slot_document(report, _to_unix())
            except ValueError as problem:
                error = str(problem)
        self._send(Explained(request=message.request, document=document, error=error))

    # --- reports ----------------------------------------------------------------------------------------------------

    def _say_findings(self, session: bytes, attachment: Attachment) -> None:
        findings = attachment.take_findings(_to_unix())
        if findings:
            # The counters first: a worker that dies behind a finding must not leave it uncounted.
            self._report(session, attachment)
            self._send(Found(session=session, findings=findings))

    def _report(self, session: bytes, attachment: Attachment) -> None:
        now = time.monotonic()
        attachment.report_at = now + REPORT_SECONDS
        counters = attachment.watch.counters
        self._send(
            Report(
                session=session,
                counters=counter_series(counters, attachment.busy_seconds, attachment.client_seconds),
                gauges=gauge_series(attachment.watch.report(now), _to_unix()),
                distributions=distributions(counters),
            )
        )

    def _report_worker(self) -> None:
        self._report_at = time.monotonic() + REPORT_SECONDS
        counters = [Series("canaryd_kernel_launches_total", (kernel,), n) for kernel, n in self._launches.items()]
        counters += [
            Series("canaryd_kernel_argument_validation_failures_total", labels, n)
            for labels, n in self._refused_launches.items()
        ]
        counters += [
            Series("canaryd_selftest_kernel_launches_total", (kernel,), n)
            for kernel, n in self._selftest_launches.items()
        ]
        counters += [
            Series("canaryd_kernel_failures_total", ("burst",), self._failures),
            Series("canaryd_selftest_runs_total", (), self._selftest_runs),
            Series("canaryd_selftest_failures_total", (), self._selftest_failures),
        ]
        gauges = []
        if self._selftest_success is not None:
            gauges.append(Series("canaryd_selftest_last_success_timestamp_seconds", (), self._selftest_success))
        self._send(WorkerReport(counters=counters, gauges=gauges, rss_bytes=resident_bytes()))


def _to_unix() -> Any:
    offset = time.time() - time.monotonic()
    return lambda moment: moment + offset


def device_answers() -> bool:
    """Whether this process's CUDA context still works. Waits for the work in flight."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096

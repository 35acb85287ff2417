"""Worker processes: spawned, pinged, killed when they hang, started again after a pause."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from canaryd.control import messages as control
from canaryd.control.channel import Channel, ChannelClosed
from canaryd.control.messages import HOST, FromWorker, Ping, Pong, Ready, Slow, Stop, ToWorker, WorkerSettings
from canaryd.logs import event_logger
from canaryd.metrics.tallies import Key, Tally

log = event_logger(__name__)

PING_INTERVAL = 0.5
UNMAP_TIMEOUT = 5.0
"""A worker that does not confirm within this time that a dead engine's memory is closed is killed for it: an open
mapping keeps the memory allocated, and the next engine cannot start."""
_REAP_SECONDS = 1.0
_CALM = 60.0
"""A worker that lived for so long starts again without a longer pause."""


class WorkerState(StrEnum):
    """Where a worker process is."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a worker may be silent, and how long to wait before it is started again; seconds."""

    hang: float
    startup: float
    backoff: float
    backoff_max: float
    queue_bytes: int


class WorkerProcess:
    """One device's worker and its successors.

    Args:
        settings: handed to each process.
        patience: timeouts.
        now: monotonic seconds.
    """

    def __init__(self, settings: WorkerSettings, patience: Patience, now: float) -> None:
        self.device = settings.device
        self.tally = Tally()
        self.gauges: dict[Key, float] = {}
        self.description = ""
        self.rss_bytes = 0
        self.state = WorkerState.WAITING
        self.restarts = 0
        self._settings = settings
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._generation = 0
        self._started = now
        self._start_at = now
        self._failures = 0
        self._ping = 0
        self._pinged = now
        self._heard = now
        self._slow = False
        self._unmaps: dict[bytes, float] = {}
        self._unreaped: list[subprocess.Popen[bytes]] = []

    # --- facts ------------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The running process."""
        return self._process.pid if self._process else None

    @property
    def source(self) -> bytes:
        """Names this process among its predecessors in the tally."""
        return self._generation.to_bytes(8, "little")

    @property
    def channel(self) -> Channel | None:
        """The channel to poll, if a process runs."""
        return self._channel

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, message: ToWorker, fds: list[int] | None = None, *, force: bool = False) -> bool:
        """Queue a message; False if no process runs or too much waits for it."""
        if self._channel is None:
            return False
        try:
            return self._channel.send(control.encode(message), fds or (), force=force)
        except ChannelClosed:
            return False  # the end of the process is seen by `receive`

    def expect_unmapped(self, session: bytes, now: float) -> None:
        """`session` was told to be unmapped."""
        self._unmaps[session] = now + UNMAP_TIMEOUT

    def unmapped(self, session: bytes) -> None:
        """The worker confirmed it."""
        self._unmaps.pop(session, None)

    def receive(self, now: float) -> list[FromWorker]:
        """Messages that came; those about the process itself are taken in here. Raises ChannelClosed."""
        if self._channel is None:
            return []
        messages: list[FromWorker] = []
        for body, fds in self._channel.receive():
            for fd in fds:
                os.close(fd)
            try:
                message = control.decode_from_worker(body)
            except msgspec.MsgspecError as error:
                raise ChannelClosed(f"the worker spoke nonsense: {error}") from error
            self._heard = now
            self._slow = isinstance(message, Slow)
            if isinstance(message, Ready):
                self.state = WorkerState.READY
                self.description = message.description
                log.info("worker ready", device=self.device, pid=self.pid, backend=message.backend)
            elif not isinstance(message, Pong | Slow):
                messages.append(message)
        return messages

    # --- life -------------------------------------------------------------------------------------------------------

    def turn(self, now: float) -> str | None:
        """Start, ping and flush as the clock wants. Returns why the running process must be replaced, or None."""
        self._unreaped = [each for each in self._unreaped if each.poll() is None]
        if self._process is None:
            if self.state is WorkerState.WAITING and now >= self._start_at:
                self._start(now)
            return None
        if self._process.poll() is not None:
            return f"it ended with status {self._process.returncode}"
        patient = self._slow or self.state is not WorkerState.READY
        limit = self._patience.startup if patient else self._patience.hang
        if now - self._heard > limit:
            return f"it was silent for {limit:g} s"
        if any(now > deadline for deadline in self._unmaps.values()):
            return "it did not close an ended engine's memory"
        if now - self._pinged >= PING_INTERVAL:
            self._ping += 1
            self._pinged = now
            self.send(Ping(number=self._ping), force=self._ping_fits())
        if self._channel is not None and self._channel.wants_write:
            try:
                self._channel.flush()
            except ChannelClosed:
                return "it closed its channel"
        return None

    def _ping_fits(self) -> bool:
        """One ping may wait beyond the limit, not one more for each interval that a worker hangs."""
        return self._channel is not None and not self._channel.wants_write

    def _start(self, now: float) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "canaryd.worker",
                    str(theirs.fileno()),
                    msgspec.json.encode(self._settings).decode(),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(os.environ, self.device),
                start_new_session=True,
            )
        self._channel = Channel(mine, limit_bytes=self._patience.queue_bytes)
        self._generation += 1
        self.state = WorkerState.STARTING
        self._started = self._heard = self._pinged = now
        log.info("worker started", device=self.device, pid=self.pid)

    def discard(self, why: str, now: float) -> None:
        """Kill what runs, keep its counters, and plan the next start."""
        if self._process is None:
            return
        log.error("worker is replaced", device=self.device, pid=self.pid, reason=why)
        self._failures = 1 if now - self._started > _CALM else self._failures + 1
        self._end()
        self.restarts += 1
        self.tally.count("canaryd_worker_restarts_total")
        pause = min(self._patience.backoff * 2 ** (self._failures - 1), self._patience.backoff_max)
        self._start_at = now + pause
        self.state = WorkerState.WAITING

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            try:
                self._process.wait(_REAP_SECONDS)
            except subprocess.TimeoutExpired:
                # It sits in the driver. Nobody may wait for it: the metrics must stay up.
                log.error("a killed worker does not end", device=self.device, pid=self.pid)
                self._unreaped.append(self._process)
            self._process = None
        self.hang_up()
        self.tally.retire(self.source)
        self.gauges = {
            key: value
            for key, value in self.gauges.items()
            if key[0] == "canaryd_selftest_last_success_timestamp_seconds"
        }
        self._unmaps.clear()

    def ask_to_stop(self) -> None:
        """Shutdown: the worker closes its mappings and ends."""
        self.send(Stop(), force=True)
        self.state = WorkerState.STOPPED

    def hang_up(self) -> None:
        """Shutdown: the process closed its end."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def has_ended(self) -> bool:
        """Whether no process runs any more."""
        return self._process is None or self._process.poll() is not None

    def finish(self) -> None:
        """Shutdown's end: whatever still runs is killed."""
        if self._process is not None and self._process.poll() is None:
            log.warning("worker did not stop in time and is killed", device=self.device, pid=self.pid)
        self._end()
        self.state = WorkerState.STOPPED


def _environment(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """A worker sees its own GPU and no other; a host worker sees none."""
    seen = {name: value for name, value in environment.items() if not name.startswith("CANARYD_")}
    seen["CUDA_VISIBLE_DEVICES"] = "" if device == HOST else device
    return seen

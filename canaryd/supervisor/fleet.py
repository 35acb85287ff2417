"""All workers: one per GPU, and one for host pools that may be started at the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from canaryd.config import Config
from canaryd.control.channel import ChannelClosed
from canaryd.control.messages import HOST, FromWorker, WorkerSettings
from canaryd.errors import AttachRefused, RefusalReason
from canaryd.supervisor.gpus import visible_gpus
from canaryd.supervisor.workers import Patience, WorkerProcess, WorkerState

STOP_SECONDS = 5.0


class Fleet:
    """The workers by device.

    Args:
        config: the daemon's configuration.
        now: monotonic seconds.
        gpus: UUIDs to use instead of asking the driver.
    """

    def __init__(self, config: Config, now: float, gpus: Sequence[str] | None = None) -> None:
        self._config = config
        self._patience = Patience(
            hang=config.workers.hang_timeout,
            startup=config.workers.startup_timeout,
            backoff=config.workers.restart_backoff,
            backoff_max=config.workers.restart_backoff_max,
            queue_bytes=config.workers.queue_bytes,
        )
        self._workers: dict[str, WorkerProcess] = {}
        for uuid in self._configured_gpus() if gpus is None else gpus:
            self._add(uuid, now)
        if config.workers.host == "on":
            self._add(HOST, now)

    def _configured_gpus(self) -> list[str]:
        wanted = self._config.workers.gpus
        if isinstance(wanted, list):
            return wanted
        return visible_gpus() if wanted == "auto" else []

    def _add(self, device: str, now: float) -> WorkerProcess:
        watch, workers, logs = self._config.watch, self._config.workers, self._config.logs
        settings = WorkerSettings(
            device=device,
            backend=None if workers.backend == "auto" else workers.backend,
            scheme=self._config.scheme,
            nice=workers.nice,
            tick=watch.tick,
            busy_share=watch.max_host_share if device == HOST else watch.max_engine_loss,
            max_age_live=watch.max_age_live,
            max_age_idle=watch.max_age_idle,
            bytes_per_burst=watch.host_bytes_per_burst if device == HOST else watch.bytes_per_burst,
            selftest_interval=self._config.selftest.interval,
            log_format=logs.format,
            log_level=logs.level,
        )
        worker = self._workers[device] = WorkerProcess(settings, self._patience, now)
        return worker

    @property
    def all(self) -> tuple[WorkerProcess, ...]:
        """Every worker."""
        return tuple(self._workers.values())

    def find(self, device: str, now: float) -> WorkerProcess:
        """The worker of `device`. Raises AttachRefused if there is none; the host worker is started when it is asked
        for."""
        worker = self._workers.get(device)
        if worker is not None:
            return worker
        if device == HOST and self._config.workers.host != "off":
            worker = self._add(HOST, now)
            worker.turn(now)
            return worker
        known = ", ".join(self._workers) or "none"
        raise AttachRefused(
            RefusalReason.GPU_NOT_VISIBLE,
            f"The pool lies on {device}, and the daemon watches: {known}.",
            "Make that GPU visible to the daemon, or set workers.host or workers.gpus.",
        )

    def missing(self) -> list[str]:
        """Why the daemon is not ready: one line for each worker that is not."""
        return [
            f"worker {worker.device} is {worker.state.value}"
            for worker in self.all
            if worker.state is not WorkerState.READY
        ]

    def turn(
        self, now: float, *, handle: Callable[[WorkerProcess, FromWorker], None], lost: Callable[[str], None]
    ) -> None:
        """Start, ping and read all workers. `lost(device)` is called for each that is replaced, before it is."""
        for worker in self.all:
            try:
                for message in worker.receive(now):
                    handle(worker, message)
                why = worker.turn(now)
            except ChannelClosed as closed:
                why = f"its channel ended: {closed}"
            if why is not None:
                lost(worker.device)
                worker.discard(why, now)

    def ask_to_stop(self) -> None:
        """Shutdown begins."""
        for worker in self.all:
            worker.ask_to_stop()

    def drain(self, handle: Callable[[WorkerProcess, FromWorker], None]) -> None:
        """Shutdown: keep the channels moving, so that a worker can say its last findings and end."""
        for worker in self.all:
            try:
                for message in worker.receive(time.monotonic()):
                    handle(worker, message)
            except ChannelClosed:
                worker.hang_up()

    def have_ended(self) -> bool:
        """Whether no worker process runs any more."""
        return all(worker.has_ended() for worker in self.all)

    def finish(self) -> None:
        """Shutdown ends: what still runs is killed."""
        for worker in self.all:
            worker.finish()

"""`python -m canaryd.worker FD SETTINGS`: started by the supervisor, with the channel's descriptor and settings."""

from __future__ import annotations

import os
import signal
import socket
import sys

import msgspec

from canaryd import logs
from canaryd.control.channel import Channel
from canaryd.control.messages import WorkerSettings

_QUEUE_BYTES = 16 << 20


def main(arguments: list[str]) -> int:
    """Run the worker until it is stopped; the exit status."""
    if len(arguments) != 2:
        sys.stderr.write("canaryd's workers are started by `canaryd serve`, not by hand\n")
        return 2
    settings = msgspec.json.decode(arguments[1], type=WorkerSettings)
    logs.configure(style=settings.log_format, level=settings.log_level)
    os.nice(settings.nice)
    # The supervisor decides when a worker ends; a Ctrl-C in its terminal is its own to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])), limit_bytes=_QUEUE_BYTES)
    # Imported late: torch takes a second, and the settings and the log must stand before it.
    from canaryd.worker.worker import Worker

    return Worker(settings, channel).run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

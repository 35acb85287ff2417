"""Structured logs on stderr: one line per event, as text or as JSON.

Events carry their facts as keyword fields. Handles, token ids and KV bytes are never passed in, so they cannot leak; a
field whose value is `bytes` is replaced by its length as a second line of defence.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

_FIELDS = "canaryd_fields"
_MAX_VALUE = 2000


class EventLogger:
    """A logger of named events with fields, over the standard library's logger of the same name."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Log for someone who debugs canaryd itself."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log a change of state."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log something that costs coverage or needs a look."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a failure or a finding."""
        self._log(logging.ERROR, event, fields)

    def _log(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


def event_logger(name: str) -> EventLogger:
    """The event logger of a module: pass `__name__`."""
    return EventLogger(name)


def configure(*, style: Literal["text", "json"], level: str, stream: TextIO | None = None) -> None:
    """Send every log line of this process to `stream` (default stderr) in the given style."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _plain(value: object) -> object:
    if isinstance(value, bool | int | float) or value is None:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    text = str(value)
    return text if len(text) <= _MAX_VALUE else text[:_MAX_VALUE] + "…"


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields: dict[str, object] = getattr(record, _FIELDS, {})
        document.update({name: _plain(value) for name, value in fields.items() if name not in document})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, _FIELDS, {})
        tail = "".join(f" {name}={self._quote(value)}" for name, value in fields.items())
        line = f"{_timestamp(record)} {record.levelname.lower():7} {record.getMessage()}{tail}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line

    @staticmethod
    def _quote(value: object) -> str:
        text = str(_plain(value))
        return json.dumps(text, ensure_ascii=False) if not text or " " in text or "\n" in text else text

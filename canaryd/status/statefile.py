"""What the daemon leaves on disk for the time when it cannot be asked."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE_NAME = "status.json"
EVERY_SECONDS = 5.0


def write(folder: Path, document: str) -> None:
    """Replace the file at once. Raises OSError."""
    path = folder / FILE_NAME
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(document)
    new.replace(path)


def read(folder: Path) -> dict[str, Any] | None:
    """The last document, None if there is none or it cannot be read."""
    try:
        document = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None

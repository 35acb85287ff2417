"""Where the daemon is, and what it says."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from canaryd.config import PORT_FILE, Config
from canaryd.errors import CanarydError

_TIMEOUT = 5.0


class Unreachable(CanarydError):
    """No daemon answers; the message says where it was looked for."""

    reason = "unreachable"


def address_of(settings: Config) -> str:
    """The daemon's address by its configuration."""
    port = settings.http.port
    port_file = settings.state_dir / PORT_FILE
    if port == 0:
        try:
            port = int(port_file.read_text())
        except (OSError, ValueError) as error:
            raise Unreachable(f"no daemon runs here: {port_file} names no port") from error
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.http.host, settings.http.host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ask(address: str, page: str) -> Any:
    """The JSON document of a page. Raises Unreachable."""
    if not address.startswith(("http://", "https://")):
        raise Unreachable(f"an address begins with http:// or https://, got {address!r}")
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}{page}", timeout=_TIMEOUT) as answer:  # noqa: S310
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise Unreachable(f"no daemon answers at {address}: {getattr(error, 'reason', error)}") from error

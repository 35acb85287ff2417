"""The daemon as the demo sees it: its public pages, and the findings file that it leaves."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from canaryd.config import PORT_FILE
from canaryd.demo.processes import Child, ChildFailed
from canaryd.findings import FILE_NAME


class DaemonPages:
    """The pages of one running daemon."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _get(self, page: str) -> bytes:
        with urllib.request.urlopen(self.url + page, timeout=5) as answer:  # noqa: S310 - our own daemon
            content: bytes = answer.read()
        return content

    def findings(self) -> list[dict[str, Any]]:
        """Open findings."""
        found: list[dict[str, Any]] = json.loads(self._get("/findings"))
        return found

    def engine(self, name: str) -> dict[str, Any] | None:
        """What `/status` says of an engine."""
        for engine in json.loads(self._get("/status"))["engines"]:
            if engine["engine"] == name:
                described: dict[str, Any] = engine
                return described
        return None

    def counters(self, name: str, label: str, **wanted: str) -> dict[str, float]:
        """Samples of one counter, added up by `label`; only those whose labels are as `wanted`."""
        from prometheus_client.parser import text_string_to_metric_families

        sums: Counter[str] = Counter()
        for family in text_string_to_metric_families(self._get("/metrics").decode()):
            for sample in family.samples:
                if sample.name == name and all(sample.labels.get(key) == value for key, value in wanted.items()):
                    sums[sample.labels.get(label, "")] += int(sample.value)
        return {key: value for key, value in sums.items() if value}


def wait_for_port(child: Child, state_dir: Path, seconds: float) -> str:
    """The address that the daemon listens on. Raises ChildFailed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        child.check()
        try:
            return f"http://127.0.0.1:{int((state_dir / PORT_FILE).read_text())}"
        except (OSError, ValueError):
            time.sleep(0.05)
    raise ChildFailed(f"the daemon did not listen within {seconds:.0f} s")


def slots_in_file(state_dir: Path) -> dict[str, int]:
    """Slots that the findings file reports, by check."""
    sums: Counter[str] = Counter()
    for path in sorted(state_dir.glob(FILE_NAME + "*")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record.get("record") in ("opened", "seen", "joined"):
                detail = record["detail"] or record["finding"]["detail"]
                sums[record["finding"]["check"]] += int(detail.get("slot_count", 1))
    return dict(sums)

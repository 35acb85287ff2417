"""From a flipped bit in an engine's memory to a page: daemon, Prometheus and Alertmanager are the real ones."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from programs import Daemon, Monitoring, get, wait_for

from canaryd.client import Client, Final, SnapshotState, export_host_tensor, row_open
from canaryd.wire.messages import GroupSpec, Identity, RegionSpec

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
PAGES, PAGE_SIZE, SLOT_BYTES = 8, 4, 96
LENGTH = 3 * PAGE_SIZE - 1
ROW_PAGES = [5, 2, 6]


class SmallEngine:
    """An engine of one row: it writes a prompt into its pool and tells the daemon so."""

    def __init__(self, socket_dir: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = torch.zeros(PAGES * PAGE_SIZE * SLOT_BYTES, dtype=torch.uint8)
        region = RegionSpec(
            name="layer0",
            memory=0,
            offset=0,
            page_stride=PAGE_SIZE * SLOT_BYTES,
            slot_stride=SLOT_BYTES,
            piece_bytes=SLOT_BYTES,
        )
        self.tokens = [self.random.randrange(50_000) for _ in range(LENGTH)]
        self.slots = [ROW_PAGES[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(LENGTH)]
        self.written = 0
        self.client = Client(
            socket_dir=socket_dir,
            identity=Identity(engine="small"),
            engine_kind="test",
            engine_version="1",
            groups=[GroupSpec(name="full", num_pages=PAGES, page_size=PAGE_SIZE, regions=[region])],
            memory=[export_host_tensor(self.pool)],
            frees=True,
            tiers="none",
            snapshot=self._snapshot,
        )
        self.client.start()

    def _snapshot(self) -> SnapshotState:
        if not self.written:
            return SnapshotState()
        return SnapshotState(rows=[row_open("row", 0, ROW_PAGES, self.written, ids=self.tokens[: self.written])])

    def serve(self) -> None:
        """One op: the whole prompt, written to the pool between `begin` and `end`."""
        op = self.client.begin()
        for slot in self.slots:
            content = self.random.randbytes(SLOT_BYTES)
            self.pool[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = torch.tensor(list(content), dtype=torch.uint8)
        final = Final()
        final.open("row", 0, ROW_PAGES, 0, ids=self.tokens)
        final.write(0, ["row"], [LENGTH], range(LENGTH), self.tokens, self.slots)
        self.written = LENGTH
        self.client.end(op, final=final)

    def corrupt(self) -> None:
        """Flip one bit of one written slot behind the daemon's back."""
        byte = self.random.choice(self.slots) * SLOT_BYTES + self.random.randrange(SLOT_BYTES)
        self.pool[byte] ^= 1 << self.random.randrange(8)


@contextmanager
def engine(socket_dir: Path, seed: int) -> Iterator[SmallEngine]:
    """A small engine that is closed at the end."""
    small = SmallEngine(socket_dir, seed)
    try:
        yield small
    finally:
        small.client.close()


def _value(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's series whose labels include these."""
    found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.M)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(value) for pairs, value in found if all(pair in pairs for pair in wanted))


@pytest.mark.operations
@pytest.mark.slow
def test_a_flipped_bit_pages(daemon: Daemon, monitoring: Monitoring, seed: int) -> None:
    with engine(daemon.socket_dir, seed) as small:
        wait_for("the engine to be attached", lambda: small.client.stats.state == "attached")
        small.serve()
        wait_for(
            "its slots to settle",
            lambda: _value(get(daemon.url + "/metrics"), "canaryd_slots", state="settled") >= LENGTH,
        )

        # Healthy: Prometheus has seen the zeros, has evaluated the rules, and nothing pages.
        wait_for("a scrape", lambda: monitoring.query('canaryd_findings_open{check="content"} == 0'))
        wait_for("a healthy pass", lambda: monitoring.query("canaryd_pass_last_completion_timestamp_seconds > 0"))
        assert not monitoring.query('ALERTS{severity="critical"}')

        small.corrupt()
        alert = monitoring.wait_for_alert("CanarydCorruption")

        assert alert["status"] == "firing"
        labels = alert["labels"]
        assert labels["severity"] == "critical"
        assert labels["check"] == "content"
        assert labels["engine"] == "small"
        assert labels["job"] == "canaryd"
        assert alert["annotations"]["runbook_url"] == "docs/runbook.md#canarydcorruption"
        text = get(daemon.url + "/metrics")
        assert _value(text, "canaryd_mismatches_total", check="content") == 1
        assert _value(text, "canaryd_findings_open") == 1
        growing = 'ALERTS{alertname="CanarydCorruptionGrowing",alertstate="firing"}'
        wait_for("growth to be seen as well", lambda: monitoring.query(growing))


@pytest.mark.operations
def test_live_exposition_is_clean_and_holds_no_family_that_the_golden_lacks(daemon: Daemon, seed: int) -> None:
    with engine(daemon.socket_dir, seed) as small:
        wait_for("the engine to be attached", lambda: small.client.stats.state == "attached")
        small.serve()
        text = wait_for("its series", lambda: _with_engine(get(daemon.url + "/metrics")))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    families = set(re.findall(r"^# TYPE (\w+) ", text, re.M))
    golden = set(re.findall(r"^# TYPE (\w+) ", GOLDEN.read_text(), re.M))
    assert {name for name in families if not name.startswith("process_")} == golden


def _with_engine(text: str) -> str:
    return text if "canaryd_engine_info{" in text else ""

"""The exposition of a known state, byte for byte: names, labels, help and order are promised to rules and dashboards.

`CANARYD_ACCEPT_GOLDEN=1` writes the file anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from canaryd.metrics.catalog import CHECKS, ENGINE_STATES, FAMILIES, INFO_LABELS
from canaryd.metrics.collector import CanarydCollector, MetricsView, OwnerView
from canaryd.metrics.tallies import Histogram

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
HOUR = 1_800_000_000.0
GPU = "GPU-00000000-0000-0000-0000-000000000001"

PROMISED = set(
    """
canaryd_mismatches_total canaryd_findings_open canaryd_suspects_total canaryd_suspects_dismissed_total canaryd_slots
canaryd_slots_stamped_total canaryd_slots_verified_total canaryd_bytes_verified_total canaryd_slots_skipped_total
canaryd_reblessed_total canaryd_oldest_unverified_timestamp_seconds canaryd_pass_coverage_ratio
canaryd_pass_last_completion_timestamp_seconds canaryd_stamp_lag_seconds canaryd_unguarded_seconds
canaryd_gpu_busy_seconds_total canaryd_kernel_launches_total canaryd_kernel_failures_total
canaryd_kernel_argument_validation_failures_total canaryd_engine_messages_total canaryd_engine_message_gaps_total
canaryd_engine_messages_rejected_total canaryd_attach_failures_total canaryd_engine_state canaryd_engine_info
canaryd_worker_restarts_total canaryd_selftest_last_success_timestamp_seconds canaryd_selftest_failures_total
canaryd_build_info
""".split()  # noqa: SIM905 - as the design lists them
)


def _lags() -> Histogram:
    return Histogram(bounds=(0.01, 0.1, 1.0), counts=[3, 5, 1, 0], total=0.875)


def known_state() -> MetricsView:
    """An engine with findings, one that is gone, one worker after a refused launch, and the daemon."""
    serving = OwnerView(
        prefix=("llm", GPU),
        state="attached",
        counters={
            ("canaryd_mismatches_total", ("content",)): 2,
            ("canaryd_suspects_total", ()): 5,
            ("canaryd_suspects_dismissed_total", ("rewritten",)): 3,
            ("canaryd_slots_stamped_total", ()): 4096,
            ("canaryd_slots_verified_total", ("content",)): 65536,
            ("canaryd_slots_verified_total", ("links",)): 131072,
            ("canaryd_bytes_verified_total", ()): 1 << 30,
            ("canaryd_gpu_busy_seconds_total", ()): 0.25,
            ("canaryd_engine_messages_total", ("end",)): 1000,
        },
        gauges={
            ("canaryd_findings_open", ("content",)): 2,
            ("canaryd_slots", ("settled",)): 4000,
            ("canaryd_slots", ("pending",)): 96,
            ("canaryd_oldest_unverified_timestamp_seconds", ()): HOUR,
            ("canaryd_unguarded_ratio", ()): 0.03125,
            ("canaryd_suspects_open", ()): 1,
            ("canaryd_reserved_nonfinite_slots", ()): 0,
            ("canaryd_rows_open", ()): 12,
            ("canaryd_ops_open", ()): 1,
            ("canaryd_ops_stalled", ()): 0,
            ("canaryd_pass_coverage_ratio", ()): 0.5,
            ("canaryd_pass_last_completion_timestamp_seconds", ()): HOUR - 5,
            ("canaryd_pass_last_duration_seconds", ()): 4.5,
            ("canaryd_pass_last_slots", ()): 3900,
            ("canaryd_pool_described_ratio", ()): 1,
            ("canaryd_engine_last_contact_timestamp_seconds", ()): HOUR + 1,
        },
        histograms={"canaryd_stamp_lag_seconds": _lags(), "canaryd_unguarded_seconds": _lags()},
        info=dict.fromkeys(INFO_LABELS, "0") | {"name": "llm", "kind": "transformers", "model": 'a "quoted" model'},
    )
    gone = OwnerView(
        prefix=("old", GPU),
        state="gone",
        gauges={("canaryd_pass_coverage_ratio", ()): 0.25, ("canaryd_findings_open", ("chain",)): 1},
    )
    worker = OwnerView(
        prefix=(GPU,),
        counters={
            ("canaryd_kernel_launches_total", ("digest",)): 600,
            ("canaryd_kernel_argument_validation_failures_total", ("canary_write", "write_offsets", "shape")): 1,
            ("canaryd_selftest_runs_total", ()): 10,
        },
        gauges={
            ("canaryd_worker_up", ()): 1,
            ("canaryd_selftest_last_success_timestamp_seconds", ()): HOUR - 30,
        },
    )
    daemon = OwnerView(
        prefix=(),
        counters={("canaryd_attach_attempts_total", ()): 2, ("canaryd_attach_failures_total", ("overlap",)): 1},
        gauges={("canaryd_findings_unwritten", ()): 0},
    )
    return MetricsView(engines=(serving, gone), workers=(worker,), daemon=daemon)


def exposition(view: MetricsView) -> str:
    """The text that `/metrics` serves, with the values that differ between runs and releases set to 0."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CanarydCollector(lambda: view))
    text = generate_latest(registry).decode()
    text = re.sub(r"^(canaryd_collection_duration_seconds) .*$", r"\1 0.0", text, flags=re.M)
    return re.sub(r'^(canaryd_build_info{version=)"[^"]*"', r'\1"0"', text, flags=re.M)


def names_in(text: str) -> set[str]:
    """Every metric name of canaryd that a text mentions; histograms' series count as their family."""
    found = set(re.findall(r"(?<![\w/.-])canaryd_[a-z_]+[a-z](?![\w.])", text))
    return {re.sub(r"(?<=_seconds)_(bucket|sum|count)$", "", name) for name in found}


def golden_names() -> set[str]:
    """The names of all families of the golden scrape."""
    return set(re.findall(r"^# TYPE (\w+) ", GOLDEN.read_text(), re.M))


def test_exposition_is_the_golden_one() -> None:
    seen = exposition(known_state())
    if os.environ.get("CANARYD_ACCEPT_GOLDEN") == "1":
        GOLDEN.write_text(seen)
    assert seen == GOLDEN.read_text()


def test_golden_holds_every_family_and_promise() -> None:
    assert {family.name for family in FAMILIES} <= golden_names()
    assert golden_names() >= PROMISED


def test_golden_shows_a_sample_of_every_family() -> None:
    text = GOLDEN.read_text()
    empty = {name for name in golden_names() if not re.search(rf"^{name}(_bucket)?[{{ ]", text, re.M)}
    assert not empty


def test_every_known_label_value_is_there_from_the_start() -> None:
    fresh = exposition(
        MetricsView(
            engines=(OwnerView(prefix=("llm", GPU), state="attached"),),
            workers=(OwnerView(prefix=(GPU,)),),
            daemon=OwnerView(prefix=()),
        )
    )
    for check in CHECKS:
        assert f'canaryd_mismatches_total{{check="{check}",engine="llm",gpu_uuid="{GPU}"}} 0.0' in fresh
    for state in ENGINE_STATES:
        assert re.search(rf'^canaryd_engine_state{{.*state="{state}"}} [01]\.0$', fresh, re.M)
    # A timestamp of 0 would read as "56 years ago" and fire every overdue alert.
    assert not re.search(r"^canaryd_\w+_timestamp_seconds({.*})? ", fresh, re.M)


def test_gone_engine_says_nothing_about_its_pool() -> None:
    text = exposition(known_state())
    assert 'canaryd_pass_coverage_ratio{engine="llm"' in text
    assert 'canaryd_pass_coverage_ratio{engine="old"' not in text
    assert f'canaryd_findings_open{{check="chain",engine="old",gpu_uuid="{GPU}"}} 1.0' in text


@pytest.mark.operations
def test_golden_is_clean_for_promtool() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],
        input=GOLDEN.read_text(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stdout + done.stderr


@pytest.mark.parametrize(
    "place", ["README.md", "docs", "configs/prometheus", "configs/kubernetes", "configs/systemd", "configs/grafana"]
)
def test_every_metric_that_is_named_exists(place: str) -> None:
    root = ROOT / place
    files = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    for path in files:
        unknown = names_in(path.read_text()) - golden_names()
        assert not unknown, f"{path.relative_to(ROOT)} names metrics that do not exist: {sorted(unknown)}"


def test_names_are_found_in_prose_and_rules() -> None:
    text = "`canaryd_slots` rate(canaryd_mismatches_total[5m]) canaryd_stamp_lag_seconds_bucket docs/canaryd_x"
    assert names_in(text) == {"canaryd_slots", "canaryd_mismatches_total", "canaryd_stamp_lag_seconds"}

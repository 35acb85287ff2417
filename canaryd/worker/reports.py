"""What the core counts, as series under the promised names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from canaryd.control.messages import Distribution, Series
from canaryd.watch.counters import Counters, Histogram
from canaryd.watch.findings import Finding
from canaryd.watch.report import SlotReport, WatchReport

Unix = Callable[[float], float]
"""Turns the worker's clock into Unix time."""


def counter_series(counters: Counters, busy_seconds: float, client_seconds: float) -> list[Series]:
    """All counters of one watch, the seconds its bursts took, and those that its client took of the engine."""
    series = [
        Series("canaryd_suspects_total", (), counters.suspects),
        Series("canaryd_slots_stamped_total", (), counters.stamped),
        Series("canaryd_bytes_verified_total", (), counters.bytes_verified),
        Series("canaryd_engine_message_gaps_total", (), counters.gaps),
        Series("canaryd_gpu_busy_seconds_total", (), busy_seconds),
        Series("canaryd_client_seconds_total", (), client_seconds),
    ]
    labelled: dict[str, Mapping[Any, int]] = {
        "canaryd_mismatches_total": counters.mismatches,
        "canaryd_suspects_dismissed_total": counters.dismissed,
        "canaryd_slots_verified_total": counters.verified,
        "canaryd_slots_skipped_total": counters.skipped,
        "canaryd_reblessed_total": counters.reblessed,
        "canaryd_stamps_dropped_total": counters.stamps_dropped,
        "canaryd_engine_oddities_total": counters.oddities,
    }
    for name, values in labelled.items():
        series += [Series(name, (label.value,), value) for label, value in values.items()]
    return series


def distributions(counters: Counters) -> list[Distribution]:
    """The histograms of one watch."""

    def one(name: str, histogram: Histogram) -> Distribution:
        return Distribution(name, tuple(histogram.bounds), tuple(histogram.counts), histogram.sum)

    return [
        one("canaryd_stamp_lag_seconds", counters.stamp_lag_seconds),
        one("canaryd_unguarded_seconds", counters.unguarded_seconds),
    ]


def gauge_series(report: WatchReport, unix: Unix) -> list[Series]:
    """All gauges of one watch. Times that never came are absent, not zero."""
    series = [Series("canaryd_slots", (state,), count) for state, count in report.slots.items()]
    series += [
        Series("canaryd_pass_coverage_ratio", (), report.pass_coverage),
        Series("canaryd_unguarded_ratio", (), report.unguarded_ratio),
        Series("canaryd_reserved_nonfinite_slots", (), report.nonfinite_reserved),
        Series("canaryd_suspects_open", (), report.open_suspects),
        Series("canaryd_rows_open", (), report.open_rows),
        Series("canaryd_ops_open", (), report.open_ops),
        Series("canaryd_ops_stalled", (), len(report.stalled_ops)),
    ]
    if report.oldest_unverified is not None:
        series.append(Series("canaryd_oldest_unverified_timestamp_seconds", (), unix(report.oldest_unverified)))
    if report.pass_completed is not None:
        series.append(Series("canaryd_pass_last_completion_timestamp_seconds", (), unix(report.pass_completed)))
        series.append(Series("canaryd_pass_last_slots", (), report.pass_slots))
    if report.pass_seconds is not None:
        series.append(Series("canaryd_pass_last_duration_seconds", (), report.pass_seconds))
    return series


def finding_detail(finding: Finding, unix: Unix) -> dict[str, Any]:
    """The finding as JSON values, its times as Unix time."""
    detail: dict[str, Any] = msgspec.to_builtins(finding)
    # A sum of few words would tell what they were.
    for name in ("check", "stored_sum", "seen_sum"):
        del detail[name]
    for name in ("first_seen", "confirmed"):
        detail[name] = unix(detail[name])
    return detail


def slot_document(report: SlotReport, unix: Unix) -> dict[str, Any]:
    """What is known of one slot as JSON values, its times as Unix time or null."""
    document: dict[str, Any] = msgspec.to_builtins(report)
    for name in ("last_verified", "last_write"):
        if document[name] is not None:
            document[name] = unix(document[name])
    return document

"""The `/metrics` document: families built afresh at each scrape from a copy of what the supervisor knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from canaryd import __version__
from canaryd.metrics.catalog import ENGINE_STATES, FAMILIES, INFO_LABELS, Family
from canaryd.metrics.tallies import Histogram, Key


@dataclass(frozen=True, kw_only=True)
class OwnerView:
    """What one owner of series (an engine's pool, a worker, or the daemon) stands at.

    `prefix` are the values of the scope's labels. For engines: `state`, and `info` by label.
    """

    prefix: tuple[str, ...]
    counters: Mapping[Key, float] = field(default_factory=dict)
    gauges: Mapping[Key, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    state: str = ""
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class MetricsView:
    """A consistent copy of everything that is exported."""

    engines: tuple[OwnerView, ...]
    workers: tuple[OwnerView, ...]
    daemon: OwnerView


class CanarydCollector(Collector):
    """Builds the families. `view` is called once per scrape, from the HTTP server's threads."""

    def __init__(self, view: Callable[[], MetricsView]) -> None:
        self._view = view

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry must not scrape while it registers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, with `canaryd_collection_duration_seconds` last."""
        start = time.perf_counter()
        view = self._view()
        for family in FAMILIES:
            owners = {"engine": view.engines, "worker": view.workers, "daemon": (view.daemon,)}[family.scope]
            yield _BUILDERS[family.kind](family, owners)
        yield _engine_info(view.engines)
        build = GaugeMetricFamily("canaryd_build_info", "The daemon's version.", labels=("version",))
        build.add_metric((__version__,), 1)
        yield build
        duration = GaugeMetricFamily("canaryd_collection_duration_seconds", "Seconds that this scrape took to build.")
        duration.add_metric((), time.perf_counter() - start)
        yield duration


def make_registry(view: Callable[[], MetricsView]) -> CollectorRegistry:
    """A registry with canaryd's families and the daemon's own process metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CanarydCollector(view))
    ProcessCollector(registry=registry)
    return registry


def _counter(family: Family, owners: Iterable[OwnerView]) -> Metric:
    metric = CounterMetricFamily(family.name, family.help, labels=(*family.prefix, *family.labels))
    for owner in owners:
        values = dict.fromkeys(family.known, 0.0)
        values.update({labels: value for (name, labels), value in owner.counters.items() if name == family.name})
        for labels, value in values.items():
            metric.add_metric((*owner.prefix, *labels), value)
    return metric


def _gauge(family: Family, owners: Iterable[OwnerView]) -> Metric:
    metric = GaugeMetricFamily(family.name, family.help, labels=(*family.prefix, *family.labels))
    for owner in owners:
        if family.living and owner.state == "gone":
            continue
        values = dict.fromkeys(family.known, 0.0)
        values.update({labels: value for (name, labels), value in owner.gauges.items() if name == family.name})
        if family.name == "canaryd_engine_state":
            values = {(state,): float(state == owner.state) for state in ENGINE_STATES}
        for labels, value in values.items():
            metric.add_metric((*owner.prefix, *labels), value)
    return metric


def _histogram(family: Family, owners: Iterable[OwnerView]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=(*family.prefix, *family.labels))
    for owner in owners:
        histogram = owner.histograms.get(family.name)
        if histogram is None:
            continue
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        ends = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        for end, count in zip(ends, histogram.counts, strict=True):
            cumulative += count
            buckets.append((end, cumulative))
        metric.add_metric(owner.prefix, buckets, sum_value=histogram.total)
    return metric


_BUILDERS: dict[str, Callable[[Family, Iterable[OwnerView]], Metric]] = {
    "counter": _counter,
    "gauge": _gauge,
    "histogram": _histogram,
}


def _engine_info(engines: Iterable[OwnerView]) -> Metric:
    metric = GaugeMetricFamily(
        "canaryd_engine_info",
        "1 for each engine that is known; join with on(engine, gpu_uuid) group_left(...).",
        labels=("engine", "gpu_uuid", *INFO_LABELS),
    )
    for owner in engines:
        metric.add_metric((*owner.prefix, *(owner.info.get(label, "") for label in INFO_LABELS)), 1)
    return metric

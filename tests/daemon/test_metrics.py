"""What `/metrics` shows for a given state."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from canaryd.metrics import catalog
from canaryd.metrics.collector import CanarydCollector, MetricsView, OwnerView, make_registry
from canaryd.metrics.tallies import Histogram
from canaryd.watch import counters as core
from canaryd.watch.report import SlotState


def registry(*engines: OwnerView, workers: tuple[OwnerView, ...] = (), daemon: OwnerView | None = None) -> object:
    made = CollectorRegistry(auto_describe=False)
    view = MetricsView(engines=engines, workers=workers, daemon=daemon or OwnerView(prefix=()))
    made.register(CanarydCollector(lambda: view))
    return made


def engine(state: str = "attached", **more: object) -> OwnerView:
    return OwnerView(prefix=("e", "host"), state=state, **more)  # type: ignore[arg-type]


def value(made: object, name: str, **labels: str) -> float | None:
    assert isinstance(made, CollectorRegistry)
    return made.get_sample_value(name, labels)


E = {"engine": "e", "gpu_uuid": "host"}


def test_every_known_label_value_is_there_from_the_start() -> None:
    made = registry(engine(), workers=(OwnerView(prefix=("host",)),))
    for family in catalog.FAMILIES:
        for known in family.known:
            labels = dict(zip(family.labels, known, strict=True))
            scope = {"engine": E, "worker": {"gpu_uuid": "host"}, "daemon": {}}[family.scope]
            assert value(made, family.name, **scope, **labels) == 0.0, (family.name, labels)


def test_the_catalog_knows_what_the_core_can_say() -> None:
    pairs = [
        (catalog.CHECKS, core.Check),
        (catalog.DISMISSALS, core.Dismissal),
        (catalog.STAMP_DROPS, core.StampDrop),
        (catalog.VERIFY_MODES, core.VerifyMode),
        (catalog.SKIPS, core.Skip),
        (catalog.REBLESS_CAUSES, core.Rebless),
        (catalog.ODDITIES, core.Oddity),
    ]
    for known, labels in pairs:
        assert set(known) == {label.value for label in labels}, labels
    assert set(catalog.SLOT_STATES) == {state.label for state in SlotState}


def test_times_that_never_came_are_absent() -> None:
    made = registry(engine(), workers=(OwnerView(prefix=("host",)),))
    for family in catalog.FAMILIES:
        if family.name.endswith("_timestamp_seconds"):
            scope = E if family.scope == "engine" else {"gpu_uuid": "host"}
            assert value(made, family.name, **scope) is None, family.name


def test_states_are_one_series_each_and_listed_in_the_help() -> None:
    made = registry(engine("stalled"))
    seen = {state: value(made, "canaryd_engine_state", **E, state=state) for state in catalog.ENGINE_STATES}
    assert seen == {state: float(state == "stalled") for state in catalog.ENGINE_STATES}
    assert all(state in catalog.BY_NAME["canaryd_engine_state"].help for state in catalog.ENGINE_STATES)


def test_an_engine_that_is_gone_keeps_counters_and_findings_but_no_gauges() -> None:
    made = registry(
        engine(
            "gone",
            counters={("canaryd_mismatches_total", ("content",)): 3.0},
            gauges={("canaryd_slots", ("settled",)): 9.0, ("canaryd_findings_open", ("content",)): 2.0},
        )
    )
    assert value(made, "canaryd_mismatches_total", **E, check="content") == 3.0
    assert value(made, "canaryd_findings_open", **E, check="content") == 2.0
    assert value(made, "canaryd_slots", **E, state="settled") is None


def test_an_engine_that_nobody_knows_has_no_series() -> None:
    assert isinstance(made := registry(), CollectorRegistry)
    assert b'engine="' not in generate_latest(made)


def test_histograms_are_cumulative() -> None:
    made = registry(engine(histograms={"canaryd_stamp_lag_seconds": Histogram((0.1, 1.0), [2, 3, 4], 8.5)}))
    name = "canaryd_stamp_lag_seconds"
    assert [value(made, f"{name}_bucket", **E, le=le) for le in ("0.1", "1.0", "+Inf")] == [2, 5, 9]
    assert (value(made, f"{name}_count", **E), value(made, f"{name}_sum", **E)) == (9, 8.5)


def test_no_created_series_and_the_process_is_there() -> None:
    view = MetricsView(engines=(engine(),), workers=(), daemon=OwnerView(prefix=()))
    text = generate_latest(make_registry(lambda: view)).decode()
    assert "_created" not in text
    assert "process_resident_memory_bytes" in text


def test_names_follow_the_conventions() -> None:
    for family in catalog.FAMILIES:
        assert (family.kind == "counter") == family.name.endswith("_total"), family.name
        assert family.help.endswith("."), family.name
        assert not {"pod", "namespace", "container", "instance", "job"} & set(family.labels)

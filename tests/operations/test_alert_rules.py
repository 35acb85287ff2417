"""The alert rules: promtool's own tests, proof that each of those can fail, and the conventions readers rely on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from canaryd.metrics.catalog import BY_NAME, ENGINE_STATES, SLOT_STATES

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "configs" / "prometheus"
DOCUMENT: dict[str, Any] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in DOCUMENT["groups"] for rule in group["rules"]}
TESTS = sorted((PROMETHEUS / "tests").glob("*.yaml"))


def _promtool(*arguments: str, folder: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def _cases(alert: str) -> list[dict[str, Any]]:
    """Every expectation about an alert in the test files."""
    tests = (test for path in TESTS for test in yaml.safe_load(path.read_text())["tests"])
    return [case for test in tests for case in test["alert_rule_test"] if case["alertname"] == alert]


# --- promtool -------------------------------------------------------------------------------------------------------


@pytest.mark.operations
def test_rules_and_example_configuration_are_valid() -> None:
    for arguments in (("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml")):
        done = _promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.operations
def test_rules_pass_their_tests() -> None:
    assert len(TESTS) >= 3
    done = _promtool("test", "rules", *(str(path) for path in TESTS))
    assert done.returncode == 0, done.stdout + done.stderr


def _failing_alerts(folder: Path, change: dict[str, str]) -> set[str]:
    """The alerts whose cases fail once the rules' expressions are replaced as in `change` (alert to expression)."""
    document = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = change.get(rule["alert"], rule["expr"])
    (folder / "alerts.yml").write_text(yaml.safe_dump(document))
    shutil.copytree(PROMETHEUS / "tests", folder / "tests")
    done = _promtool("test", "rules", *(path.name for path in TESTS), folder=folder / "tests")
    return set(re.findall(r"alertname: (\w+), time", done.stdout + done.stderr))


@pytest.mark.operations
def test_tests_see_an_alert_that_never_fires(tmp_path: Path) -> None:
    assert _failing_alerts(tmp_path, dict.fromkeys(RULES, "vector(0) > 1")) == set(RULES)


@pytest.mark.operations
def test_tests_see_an_alert_that_always_fires(tmp_path: Path) -> None:
    assert _failing_alerts(tmp_path, dict.fromkeys(RULES, "vector(1)")) == set(RULES)


@pytest.mark.operations
def test_tests_see_a_counter_that_was_never_zero(tmp_path: Path) -> None:
    """Without its second half, a rule on an increase misses what happened before the first scrape."""
    halves = {name: rule["expr"].partition(" or (")[0] for name, rule in RULES.items() if "increase(" in rule["expr"]}
    # These two have a zero from the start: their series are made before anything can happen.
    created_early = {"CanarydMessagesRejected", "CanarydKernelFailures"}
    assert _failing_alerts(tmp_path, halves) == set(halves) - created_early


# --- conventions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alert", RULES)
def test_alert_keeps_the_conventions(alert: str) -> None:
    rule = RULES[alert]
    assert re.fullmatch(r"Canaryd([A-Z][a-z]+)+", alert)
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    assert annotations["summary"].endswith(".")
    assert "{{" not in annotations["summary"], "a summary is static; the description has the values"
    assert annotations["runbook_url"] == f"docs/runbook.md#{alert.lower()}"
    if rule["labels"]["severity"] == "critical":
        assert "for" not in rule, "a page does not wait"


@pytest.mark.parametrize("alert", RULES)
def test_alert_has_positive_and_negative_cases(alert: str) -> None:
    fires = [bool(case["exp_alerts"]) for case in _cases(alert)]
    assert True in fires
    assert False in fires


def test_runbook_has_one_section_per_alert() -> None:
    sections = re.findall(r"^## (Canaryd\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.M)
    assert sections == list(RULES)


def test_selected_label_values_exist() -> None:
    expressions = " ".join(rule["expr"] for rule in RULES.values())
    states = re.findall(r'canaryd_engine_state\{state=~?"([^"]+)"', expressions)
    assert {state for each in states for state in each.split("|")} <= set(ENGINE_STATES)
    assert set(re.findall(r'canaryd_slots\{state="([^"]+)"', expressions)) <= set(SLOT_STATES)
    modes = re.findall(r'canaryd_slots_verified_total\{mode=~"([^"]+)"', expressions)
    assert {(mode,) for each in modes for mode in each.split("|")} <= set(BY_NAME["canaryd_slots_verified_total"].known)
    assert states
    assert modes


@pytest.mark.parametrize("alert", RULES)
def test_labels_in_descriptions_survive_the_expression(alert: str) -> None:
    """A description that names a label which the expression drops would print nothing in its place."""
    rule = RULES[alert]
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]))
    kept = [case["exp_labels"] for cases in _cases(alert) for case in cases["exp_alerts"]]
    assert kept
    for labels in kept:
        assert named <= set(labels)


def test_thresholds_follow_the_default_configuration() -> None:
    defaults = yaml.safe_load((ROOT / "configs" / "canaryd.yaml").read_text())
    overdue = RULES["CanarydPassOverdue"]["expr"]
    assert f"> {2 * defaults['watch']['max_age_idle']:.0f})" in overdue
    selftest = re.search(r"seconds > (\d+)", RULES["CanarydSelftestOverdue"]["expr"])
    assert selftest is not None
    assert int(selftest.group(1)) >= 2 * defaults["selftest"]["interval"]
    port = defaults["http"]["port"]
    assert f"127.0.0.1:{port}" in (PROMETHEUS / "prometheus.yml").read_text()
    assert f"CANARYD_HTTP__PORT={port}" in (ROOT / "Dockerfile").read_text()

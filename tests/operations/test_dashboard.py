"""The Grafana dashboard: provisionable, and each panel says what it shows, in which unit, and for which alert."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "configs" / "grafana" / "canaryd.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_is_provisionable() -> None:
    assert DASHBOARD["uid"] == "canaryd"
    assert "id" not in DASHBOARD
    assert DASHBOARD["schemaVersion"] >= 39
    assert [panel["id"] for panel in PANELS] == list(range(1, len(PANELS) + 1))
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "instance", "engine", "gpu_uuid"]
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in PANELS for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_name_units_and_alerts_that_exist() -> None:
    groups = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["description"].endswith(".")
        assert set(re.findall(r"Canaryd[A-Z]\w+", panel["description"])) <= alerts


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_rates_follow_the_resolution(expression: str) -> None:
    assert re.findall(r"\[(.*?)\]", expression) in ([], ["$__rate_interval"])
    assert "$instance" in expression


@pytest.mark.operations
def test_expressions_parse(tmp_path: Path) -> None:
    rules = [
        {"record": f"test:panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "rules.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""The runbook has a section for whatever can wake someone, and every link to it leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from canaryd.metrics.catalog import CHECKS
from canaryd.watch.findings import Kind

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "runbook.md").read_text()
SECTIONS = {
    re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): body
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
}
ALERTS = [
    rule["alert"].lower()
    for group in yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
FULL = [f"check-{check}" for check in CHECKS] + [f"class-{kind.value}" for kind in Kind]


@pytest.mark.parametrize("anchor", [*ALERTS, *FULL])
def test_every_alert_check_and_class_has_a_section(anchor: str) -> None:
    assert len(SECTIONS[anchor]) > 100


@pytest.mark.parametrize("anchor", ["canarydcorruption", *FULL])
def test_a_section_says_what_to_do(anchor: str) -> None:
    for part in ("**Meaning.**", "**Confirm.**", "**Do.**", "**Attach.**"):
        assert part in SECTIONS[anchor], part


def test_every_link_to_the_runbook_leads_somewhere() -> None:
    files = [
        *(ROOT / "canaryd").rglob("*.py"),
        *(ROOT / "configs").rglob("*.y*ml"),
        *(ROOT / "configs").rglob("*.json"),
    ]
    links = {(file, anchor) for file in files for anchor in re.findall(r"runbook\.md#([\w-]+)", file.read_text())}
    codes = set(re.findall(r'"(canaryd[a-z]+|check-\w+)"', (ROOT / "canaryd" / "status" / "problems.py").read_text()))
    assert len(links) >= len(ALERTS)
    assert len(codes) > 5
    assert {anchor for _file, anchor in links} | codes <= set(SECTIONS)

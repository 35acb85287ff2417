"""`docs/configuration.md` is made from the configuration's models and from the comments of `configs/canaryd.yaml`.

`CANARYD_ACCEPT_GOLDEN=1` writes it anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel

from canaryd.config import Config

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
EXAMPLE = ROOT / "configs" / "canaryd.yaml"

INTRODUCTION = """\
# Configuration

`canaryd serve --config FILE` reads one YAML file; `configs/canaryd.yaml` holds every key at its default. Every key can
be left out. An environment variable overrides the file: its name is `CANARYD_`, then the key in capitals, with two
underscores for each dot; its value is read as YAML. An unknown key or variable, or a value that is not legal, ends
`serve` with status 2 and a message that names the key, the value and what would be legal.

Durations are seconds. Sizes are bytes, or text such as `256MiB`.
"""


def leaves(
    model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, object]]:
    """(key, what is legal, default) of every key, in the models' order."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*prefix, name))
        else:
            yield (*prefix, name), field.description or "", field.default


def comments(text: str) -> dict[tuple[str, ...], str]:
    """The comment of every key: behind it, below it when it goes on there, or above it."""
    found: dict[tuple[str, ...], str] = {}
    section: tuple[str, ...] = ()
    above: list[str] = []
    for line in text.splitlines():
        match = re.match(r"( *)(\w+):\s*([^#]*?)\s*(?:#\s*(.*))?$", line)
        if line.startswith("#"):
            above.append(line.lstrip("# "))
        elif match is None:
            above = []
        else:
            indent, name, value, behind = match.groups()
            section = () if not indent and value else section if indent else (name,)
            if value:
                found[(*section, name)] = behind or " ".join(above)
            above = []
    return found


def reference() -> str:
    """The page."""
    meaning = comments(EXAMPLE.read_text())
    values = yaml.safe_load(EXAMPLE.read_text())
    parts = [INTRODUCTION]
    current: tuple[str, ...] | None = None
    for key, legal, _ in leaves():
        if key[:-1] != current:
            current = key[:-1]
            title = f"## {'.'.join(current)}" if current else "## Directories and fingerprint"
            parts.append(f"\n{title}\n\n| key | default | legal | meaning |\n| --- | --- | --- | --- |\n")
        value = values
        for part in key:
            value = value[part]
        shown = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
        row = (f"`{'.'.join(key)}`", f"`{shown}`", legal, meaning.get(key, ""))
        parts.append("| " + " | ".join(row) + " |\n")
    return "".join(parts)


def test_page_is_in_step_with_the_models() -> None:
    expected = reference()
    if os.environ.get("CANARYD_ACCEPT_GOLDEN") == "1":
        PAGE.write_text(expected)
    assert PAGE.read_text() == expected


def test_example_holds_every_key_at_its_default() -> None:
    assert Config.model_validate(yaml.safe_load(EXAMPLE.read_text())) == Config()
    example = comments(EXAMPLE.read_text())
    assert list(example) == [key for key, _, _ in leaves()]


def test_every_key_is_explained() -> None:
    for key, legal, _ in leaves():
        assert legal, f"{'.'.join(key)} does not say what is legal"


def test_comments_are_found_above_and_behind() -> None:
    text = "# Where\n# it is.\nplace: /x\n\npart:\n  a: 1   # how many\n  b: 2\n"
    assert comments(text) == {("place",): "Where it is.", ("part", "a"): "how many", ("part", "b"): ""}

"""The README's examples run as they stand, on a small pool in host memory."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import canaryd.client

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
CLIENT = next(block for block in PYTHON if "client.begin()" in block)


def test_client_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages, page_size, slot_bytes, layers = 8, 4, 64, 2
    monkeypatch.setattr(canaryd.client, "export_cuda_tensor", canaryd.client.export_host_tensor)
    code = CLIENT.replace("= 4096, 16, 2048", f"= {pages}, {page_size}, {slot_bytes}")
    code = code.replace("/run/canaryd", str(tmp_path))
    assert code.count(str(tmp_path)) == 1
    names: dict[str, Any] = {
        "layers": layers,
        "pool": torch.zeros(layers * pages * page_size * slot_bytes, dtype=torch.uint8),
        "running": [],
        "tokens": [11, 12, 13],
        "slots": [20, 21, 22],
        "event": SimpleNamespace(query=lambda: True),
    }
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102
    client: canaryd.client.Client = names["client"]
    try:
        deadline = time.monotonic() + 30
        while client.open_ops() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not client.open_ops(), "the op's event is done, so the client ends the op"
        assert client.stats.errors == 0
    finally:
        client.close()


def test_adapter_example_names_what_exists() -> None:
    (block,) = (block for block in PYTHON if block != CLIENT)
    calls: list[dict[str, Any]] = []
    code = block.replace("from canaryd.engines.transformers import attach\n", "")
    assert code != block

    def attach(manager: object, **arguments: Any) -> None:
        calls.append(arguments)

    exec(compile(code, "README.md", "exec"), {"attach": attach, "manager": None})  # noqa: S102
    parameters = subprocess.run(
        [
            sys.executable,
            "-c",
            "import inspect, canaryd.engines.transformers as t; print(*inspect.signature(t.attach).parameters)",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert set(calls[0]) <= set(parameters.stdout.split())


@pytest.mark.parametrize("command", ["serve", "status", "config", "selftest"])
def test_commands_that_documents_name_exist(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "canaryd.cli", command, "--help"], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0


def test_documents_name_no_other_commands() -> None:
    texts = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]
    code = [piece for text in texts for piece in re.findall(r"```\n.*?```|`[^`\n]+`", text, re.S)]
    named = {name for piece in code for name in re.findall(r"(?:^|[`\n])canaryd ([a-z]+)\b", piece)}
    help_text = subprocess.run(
        [sys.executable, "-m", "canaryd.cli", "--help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert "serve" in named
    assert named <= set(re.findall(r"^    ([a-z]+) ", help_text, re.M))

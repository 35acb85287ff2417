"""Which process may load what: a wrong import at the top of one module would cost every engine or supervisor."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "triton", "numpy", "transformers", "cuda", "pynvml"}
CLIENT_MAY_LOAD = ("zmq", "msgspec")

REPORT = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(loaded)))
"""


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages that a fresh interpreter loads when it imports `modules`."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT, *modules], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def modules_under(package: str) -> list[str]:
    """Every module below a package's folder, by its import name."""
    folder = ROOT / package.replace(".", "/")
    files = (path.relative_to(ROOT).with_suffix("") for path in folder.rglob("*.py"))
    return sorted(".".join(file.parts).removesuffix(".__init__") for file in files)


SUPERVISOR = [
    "cli",
    "serve",
    "http",
    "metrics.collector",
    "metrics.catalog",
    "control.channel",
    "findings",
    "config",
    "status",
    "logs",
]


def test_supervisor_loads_nothing_heavy() -> None:
    modules = [f"canaryd.{name}" for name in SUPERVISOR] + modules_under("canaryd.supervisor")
    assert len(modules) > len(SUPERVISOR) + 3
    if loaded_by(*modules) & HEAVY:
        guilty = {module: heavy for module in modules if (heavy := loaded_by(module) & HEAVY)}
        pytest.fail(f"the supervisor must load none of {sorted(HEAVY)}: {guilty}")


def test_client_loads_only_its_two_dependencies() -> None:
    modules = modules_under("canaryd.client") + modules_under("canaryd.wire")
    assert len(modules) > 3
    allowed = loaded_by(*CLIENT_MAY_LOAD) | {"canaryd"} | set(sys.stdlib_module_names)
    assert loaded_by(*modules) <= allowed


def test_adapters_load_their_engines_lazily() -> None:
    assert not loaded_by(*modules_under("canaryd.engines")) & {"transformers", "vllm", "sglang", "triton"}


def test_kernels_package_loads_triton_lazily() -> None:
    assert "triton" not in loaded_by("canary_kernels")


def imports_of(source: str) -> set[str]:
    """Top-level packages that a module's source names in its imports, lazy ones included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_imports_of_sees_lazy_imports() -> None:
    assert imports_of("def f():\n    import canaryd.watch\n    from torch import x") == {"canaryd", "torch"}


def test_kernels_package_knows_nothing_of_the_daemon() -> None:
    files = sorted((ROOT / "kernels" / "canary_kernels").rglob("*.py"))
    assert files
    offenders = [str(file.relative_to(ROOT)) for file in files if "canaryd" in imports_of(file.read_text())]
    assert not offenders


def test_core_does_no_input_or_output() -> None:
    files = sorted((ROOT / "canaryd" / "watch").rglob("*.py"))
    assert files
    outside = {"socket", "zmq", "time", "datetime", "threading", "asyncio", "subprocess", "os", "random"}
    offenders = {file.name: imports_of(file.read_text()) & outside for file in files}
    assert not {name: used for name, used in offenders.items() if used}

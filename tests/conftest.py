"""What every test shares: one thread, poisoned memory, a printed seed, and what must not be skipped where.

Environment: `CANARYD_TEST_SEED=N` replays a seed. `CANARYD_TEST_GPU=1` (`make test-gpu`) turns a skipped GPU test into
a failure; `CANARYD_TEST_OPERATIONS=1` (`make test-operations`) and `CI=true` do so for operations tests.
"""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch or numpy, and inherited by the processes that tests start: tests share few cores.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

POISON = 0xA5
OPERATIONS_PROGRAMS = ("promtool", "prometheus", "prometheus-alertmanager", "gcc")
OPERATIONS_REMEDY = "sudo apt-get install prometheus prometheus-alertmanager gcc libc6-dev python3-dev"
GPU_REQUIRED = os.environ.get("CANARYD_TEST_GPU") == "1"
OPERATIONS_REQUIRED = os.environ.get("CANARYD_TEST_OPERATIONS") == "1" or os.environ.get("CI") == "true"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-poison", action="store_true", help="leave memory of torch.empty as the allocator gives it")


# --- what must not be skipped ---------------------------------------------------------------------------------------


def _missing_programs() -> list[str]:
    return [name for name in OPERATIONS_PROGRAMS if shutil.which(name) is None]


def _cuda_missing() -> str | None:
    """The reason why GPU tests cannot run, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing_programs()
    for item in items:
        if missing and item.get_closest_marker("operations"):
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)} missing: {OPERATIONS_REMEDY}"))
        if item.get_closest_marker("gpu") and not GPU_REQUIRED:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: make test-gpu"))


def _has_gpu_tests(folder: Path) -> bool:
    return any("mark.gpu" in file.read_text(encoding="utf-8") for file in folder.rglob("*.py"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """`make test-gpu` leaves out folders without GPU tests: its machine need not have what those import."""
    root = Path(__file__).parent
    folder = collection_path if collection_path.is_dir() else collection_path.parent
    return True if GPU_REQUIRED and root in folder.parents and not _has_gpu_tests(folder) else None


def pytest_sessionstart() -> None:
    reason = _cuda_missing() if GPU_REQUIRED else None
    if reason is not None:
        pytest.exit(f"make test-gpu needs a GPU, and {reason}", returncode=1)


def _must_run(item: pytest.Item) -> bool:
    required = (GPU_REQUIRED and item.get_closest_marker("gpu")) or (
        OPERATIONS_REQUIRED and item.get_closest_marker("operations")
    )
    return bool(required)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.skipped and _must_run(item):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} must not be skipped here: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    missing = _missing_programs()
    if missing and not OPERATIONS_REQUIRED:
        terminalreporter.section("operations tests did not run", yellow=True)
        terminalreporter.line(f"They need {', '.join(missing)}. On Debian and Ubuntu: {OPERATIONS_REMEDY}")


# --- seeds and memory -----------------------------------------------------------------------------------------------


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's seed: fixed per test, or `CANARYD_TEST_SEED`; printed, so that a failure shows it."""
    chosen = int(os.environ.get("CANARYD_TEST_SEED", zlib.crc32(request.node.nodeid.encode())))
    print(f"CANARYD_TEST_SEED={chosen}")
    return chosen


def _ours(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in {"canaryd", "canary_kernels"}


def _poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """`allocate`, but memory that our packages ask for is filled with `POISON` bytes, as real memory might be."""
    import torch

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        if _ours(sys._getframe(1)) and tensor.numel() and tensor.is_contiguous() and tensor.device.type != "meta":
            tensor.detach().view(-1).view(torch.uint8).fill_(POISON)
        return tensor

    return poisoned


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin return poisoned memory to our packages, so that a read before a write shows."""
    if "torch" not in sys.modules or request.config.getoption("--no-poison"):
        return
    import torch

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """torch computes on one thread, as in the daemon."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)

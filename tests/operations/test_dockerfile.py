"""The image, without a container engine: its structure, its health check, and that Triton can start a GPU in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER_PACKAGES = {"gcc", "libc6-dev", "python3-dev"}


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(instruction, arguments) in order; comments dropped, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.M)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    pairs = (line.strip().split(None, 1) for line in lines if line.strip())
    return [(name, " ".join(rest.split())) for name, rest in pairs]


def stages(dockerfile: str) -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage name; "" holds what stands before the first FROM."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    current = ""
    for name, rest in instructions(dockerfile):
        if name == "FROM":
            image, _, current = rest.partition(" AS ")
            assert image == "${BASE_IMAGE}", "the base image is an argument in every stage"
            found[current] = []
        else:
            found[current].append((name, rest))
    return found


DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = stages(DOCKERFILE)
RUNTIME = STAGES["runtime"]


def runtime(name: str) -> list[str]:
    """Arguments of the runtime stage's instructions of that name."""
    return [rest for instruction, rest in RUNTIME if instruction == name]


def environment() -> dict[str, str]:
    """The variables that the runtime stage sets."""
    return dict(pair.split("=", 1) for rest in runtime("ENV") for pair in rest.split())


def test_stages_and_base_image() -> None:
    assert list(STAGES) == ["", "build", "runtime"]
    assert [name for name, _ in STAGES[""]] == ["ARG"]
    assert STAGES[""][0][1].startswith("BASE_IMAGE=")


def test_runs_without_root() -> None:
    (user,) = runtime("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    last_run = max(index for index, (name, _) in enumerate(RUNTIME) if name in {"RUN", "COPY"})
    assert RUNTIME.index(("USER", user)) > last_run


def test_writes_only_where_volumes_go() -> None:
    (run,) = runtime("RUN")
    installed = re.search(r"install -d .*?(/[^&]+)", run)
    assert installed is not None
    writable = installed.group(1).split()
    values = environment()
    for variable in ("CANARYD_SOCKET_DIR", "CANARYD_STATE_DIR", "TRITON_CACHE_DIR"):
        assert any(Path(values[variable]).is_relative_to(place) for place in writable), variable
        assert any(place in DOCKERFILE.split("ENV PATH")[0].rsplit("# With a read-only", 1)[1] for place in writable)
    assert values["PYTHONDONTWRITEBYTECODE"] == "1"


def test_build_is_pinned() -> None:
    installs = [rest for name, rest in STAGES["build"] if name == "RUN" and "pip install" in rest]
    assert installs
    assert all("-c requirements-dev.txt" in rest for rest in installs)


def _ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` out of the build context: the last rule that matches decides."""
    verdict = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.lstrip("!")
            if fnmatch(path, pattern) or path.startswith(pattern + "/"):
                verdict = not line.startswith("!")
    return verdict


def test_copied_files_are_in_the_context() -> None:
    sources = [
        source
        for steps in STAGES.values()
        for name, rest in steps
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert "canaryd" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not _ignored(source), source
    assert _ignored(".git")
    assert _ignored(".venv")
    assert _ignored("tests")


@contextmanager
def _answering(status: int) -> Iterator[int]:
    """A web server that answers every GET with `status`; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_health_check_asks_the_daemon(status: int, healthy: bool) -> None:
    (check,) = runtime("HEALTHCHECK")
    command = json.loads(check.partition(" CMD ")[2])
    assert command[0] == "python3"
    with _answering(status) as port:
        variables = {**os.environ, "CANARYD_HTTP__PORT": str(port)}
        done = subprocess.run(
            [sys.executable, *command[1:]], env=variables, timeout=60, capture_output=True, check=False
        )
    assert (done.returncode == 0) is healthy
    assert environment()["CANARYD_HTTP__PORT"].isdecimal()


# --- Triton's C stub ------------------------------------------------------------------------------------------------

# Triton's own code, as a first launch runs it. Lazy binding stands in for the driver's functions, which are not called.
BUILD_STUB = """
import os, sys, sysconfig
from pathlib import Path
sys.setdlopenflags(os.RTLD_LAZY)
from triton.backends.nvidia import driver
from triton.runtime.build import compile_module_from_src
if os.environ.get("WITHOUT_HEADERS"):
    sysconfig.get_paths = lambda **scheme: {"include": os.environ["WITHOUT_HEADERS"]}
module = compile_module_from_src(
    src=(Path(driver.dirname) / "driver.c").read_text(),
    name="cuda_utils",
    library_dirs=driver.library_dirs(),
    include_dirs=driver.include_dirs,
    libraries=driver.libraries,
)
assert callable(module.launch) and callable(module.load_binary)
print("stub:", module.__file__)
"""


@pytest.fixture
def stub_environment(tmp_path: Path) -> dict[str, str]:
    """Variables under which Triton finds a libcuda without functions, an empty cache, and Debian's compiler."""
    (tmp_path / "driver").mkdir()
    library = tmp_path / "driver" / "libcuda.so.1"
    command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-x", "c", "/dev/null"]
    subprocess.run(command, check=True, timeout=60)
    (tmp_path / "empty").mkdir()
    return {
        "PATH": "/usr/bin:/bin",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "LD_LIBRARY_PATH": str(library.parent),
    }


def _build_stub(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUILD_STUB]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_runtime_stage_keeps_compiler_and_headers() -> None:
    (run,) = runtime("RUN")
    packages = re.search(r"apt-get install -y --no-install-recommends ([^&]+)", run)
    assert packages is not None
    assert set(packages.group(1).split()) >= COMPILER_PACKAGES
    assert not re.search(r"apt-get (-y )?(purge|remove|autoremove)", run)
    assert set(environment()["PATH"].split(":")) >= {"/usr/bin", "/bin"}
    assert "CC" not in environment()


@pytest.mark.operations
def test_first_launch_compiles_with_these_packages(stub_environment: dict[str, str]) -> None:
    done = _build_stub(stub_environment)
    assert done.returncode == 0, done.stderr
    assert "stub: " + stub_environment["TRITON_CACHE_DIR"] in done.stdout


@pytest.mark.operations
def test_first_launch_fails_without_a_compiler(stub_environment: dict[str, str], tmp_path: Path) -> None:
    done = _build_stub({**stub_environment, "PATH": str(tmp_path / "empty")})
    assert done.returncode != 0
    assert "Failed to find C compiler" in done.stderr


@pytest.mark.operations
def test_first_launch_fails_without_headers(stub_environment: dict[str, str], tmp_path: Path) -> None:
    done = _build_stub({**stub_environment, "WITHOUT_HEADERS": str(tmp_path / "empty")})
    assert done.returncode != 0
    assert "Python.h" in done.stderr

"""Gathers the doctor's facts. What touches CUDA runs in processes of its own, which may hang in a broken driver."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from canaryd.commands import daemon
from canaryd.commands.daemon import Unreachable
from canaryd.config import Config
from canaryd.doctor.examine import NEEDED, NEEDED_FOR_GPUS
from canaryd.doctor.facts import Facts, Folder, Gpu

_SECONDS = 90.0
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


def gather(config: Config, *, quick: bool) -> Facts:
    """Look at everything; with `quick` no CUDA context is made."""
    driver, gpus, error = _gpus() if config.workers.gpus != "off" else (None, (), None)
    cuda: dict[str, Any] = {}
    if gpus:
        cuda = _probe("uuids")
    ipc_error = None
    if gpus and not quick and "error" not in cuda:
        ipc_error = str(_probe("ipc").get("error", ""))
    return Facts(
        user=os.geteuid(),
        packages={name: _version(name) for name in (NEEDED | NEEDED_FOR_GPUS)},
        driver=driver,
        gpus=gpus,
        gpus_error=error,
        cuda_uuids=tuple(cuda.get("uuids", ())),
        cuda_error=cuda.get("error"),
        ipc_error=ipc_error,
        mps=_mps(),
        socket_dir=_folder(config.socket_dir),
        state_dir=_folder(config.state_dir),
        is_first_process=b"canaryd" in _first_process(),
        hidden_engines=_hidden_engines(config),
        compiler=bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")),
        cache_writable=_cache_writable(),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> tuple[str | None, tuple[Gpu, ...], str | None]:
    """Driver version, GPUs, and why there are none."""
    try:
        import pynvml
    except ImportError:
        return None, (), "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, (), str(error)
    try:
        from canaryd.supervisor.gpus import visible_gpus

        driver = pynvml.nvmlSystemGetDriverVersion()
        return str(driver), tuple(_gpu(pynvml, uuid) for uuid in visible_gpus()), None
    except pynvml.NVMLError as error:
        return None, (), str(error)
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, uuid: str) -> Gpu:
    # visible_gpus has ended its own use of the library, which counts its users
    device = nvml.nvmlDeviceGetHandleByUUID(uuid)

    def ask(name: str) -> Any:
        try:
            return getattr(nvml, name)(device)
        except nvml.NVMLError:
            return None  # this GPU does not say

    mode, ecc = ask("nvmlDeviceGetComputeMode"), ask("nvmlDeviceGetEccMode")
    return Gpu(
        uuid=uuid,
        name=str(ask("nvmlDeviceGetName") or ""),
        compute_mode=None if mode is None else _COMPUTE_MODES.get(int(mode), "unknown"),
        ecc=None if ecc is None else bool(ecc[0]),
    )


def _probe(what: str) -> dict[str, Any]:
    """The answer of `canaryd.doctor.cuda_probe`; `error` if there is none."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "canaryd.doctor.cuda_probe", what],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"the driver did not answer for {_SECONDS:.0f} s"}
    except (IndexError, ValueError):
        return {"error": f"the probe ended with status {done.returncode}"}
    return answer


def _mps() -> bool:
    """Whether a process of this environment would be a client of MPS."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # noqa: S108 - the driver's default
    return (pipe / "control").exists()


def _folder(path: Path) -> Folder:
    try:
        status = path.lstat()
    except OSError:
        return Folder(path=str(path))
    return Folder(
        path=str(path),
        mode=stat.S_IMODE(status.st_mode),
        owner=status.st_uid,
        is_folder=stat.S_ISDIR(status.st_mode),
        writable=os.access(path, os.W_OK | os.X_OK),
        free_bytes=shutil.disk_usage(path).free,
    )


def _first_process() -> bytes:
    try:
        return Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return b""


def _hidden_engines(config: Config) -> tuple[str, ...] | None:
    try:
        status = daemon.ask(daemon.address_of(config), "/status")
    except Unreachable:
        return None
    return tuple(each["engine"] for each in status["engines"] if each["process_visible"] is False)


def _cache_writable() -> bool:
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)

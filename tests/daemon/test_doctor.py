"""The doctor: each thing that can be wrong is named with its fix, and a healthy machine gets no advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from canaryd.cli import main
from canaryd.commands.doctor import render
from canaryd.doctor.examine import examine
from canaryd.doctor.facts import Facts, Folder, Gpu

GPU = Gpu(uuid="GPU-1", name="H200", compute_mode="default", ecc=True)
PRIVATE = Folder(path="/run/c", mode=0o700, owner=7, is_folder=True, writable=True, free_bytes=1 << 40)
HEALTHY = Facts(
    user=7,
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0", "pyzmq": "27.0", "msgspec": "0.20", "pydantic": "2.12",
              "cuda-bindings": "13.0", "nvidia-ml-py": "13.580"},
    driver="580",
    gpus=(GPU,),
    cuda_uuids=("GPU-1",),
    ipc_error="",
    socket_dir=PRIVATE,
    state_dir=PRIVATE,
    hidden_engines=(),
)  # fmt: skip


def replaced(value: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


def test_a_healthy_machine_gets_no_advice() -> None:
    checks = examine(HEALTHY, wants_gpus=True)
    assert {each.state for each in checks} == {"ok"}
    assert not any(each.fix for each in checks)
    assert not any("fix:" in line for line in render(checks))


@pytest.mark.parametrize(
    ("changes", "name", "state", "said", "fix"),
    [
        ({"packages": HEALTHY.packages | {"torch": "2.10.1"}}, "versions", "failed", "older than 2.11", "daemon,cuda"),
        ({"packages": HEALTHY.packages | {"nvidia-ml-py": None}}, "versions", "failed", "missing", "pip install"),
        ({"gpus": (), "gpus_error": "no driver"}, "gpus", "warning", "no driver", "NVIDIA_VISIBLE_DEVICES"),
        ({"cuda_error": "no libcuda"}, "cuda", "failed", "no libcuda", "driver"),
        ({"cuda_uuids": ("GPU-2",)}, "cuda", "failed", "GPU-1", "UUID"),
        ({"ipc_error": "CUDA_ERROR_X"}, "ipc", "failed", "CUDA_ERROR_X", "shareProcessNamespace"),
        ({"ipc_error": None}, "ipc", "skipped", "not tried", "--quick"),
        ({"gpus": (replaced(GPU, compute_mode="exclusive_process"),)}, "compute mode", "failed", "exclusive", "-c"),
        ({"gpus": (replaced(GPU, compute_mode="prohibited"),)}, "compute mode", "failed", "prohibited", "-c DEFAULT"),
        ({"mps": True}, "sharing", "warning", "MPS", "outside"),
        ({"gpus": (replaced(GPU, ecc=False),)}, "ecc", "warning", "ECC is off", "nvidia-smi"),
        ({"compiler": False}, "compiler", "failed", "compiler", "gcc"),
        ({"cache_writable": False}, "cache", "failed", "cache", "TRITON_CACHE_DIR"),
        ({"socket_dir": Folder(path="/run/c")}, "socket_dir", "warning", "not there", "mkdir"),
        ({"socket_dir": replaced(PRIVATE, is_folder=False)}, "socket_dir", "failed", "no directory", "socket_dir"),
        ({"socket_dir": replaced(PRIVATE, mode=0o755)}, "socket_dir", "failed", "0755", "chmod 0700 /run/c"),
        ({"socket_dir": replaced(PRIVATE, owner=8)}, "socket_dir", "failed", "user 8", "user"),
        ({"state_dir": Folder(path="/v")}, "state_dir", "warning", "not there", "mkdir"),
        ({"state_dir": replaced(PRIVATE, writable=False)}, "state_dir", "failed", "cannot be written", "user"),
        ({"state_dir": replaced(PRIVATE, free_bytes=1 << 20)}, "state_dir", "warning", "1 MiB", "space"),
        ({"hidden_engines": ("llm",)}, "pids", "failed", "llm", "shareProcessNamespace"),
        ({"is_first_process": True}, "pids", "warning", "process 1", "shareProcessNamespace"),
        ({"hidden_engines": None}, "pids", "skipped", "No daemon", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_fix(
    changes: dict[str, Any], name: str, state: str, said: str, fix: str
) -> None:
    checks = examine(replaced(HEALTHY, **changes), wants_gpus=True)
    (found,) = [each for each in checks if each.name == name]
    assert found.state == state
    assert said in found.said
    assert fix in found.fix
    assert all(each.state in ("ok", "skipped") for each in checks if each.name != name)
    assert max(len(line) for line in render(checks)) <= 80


def test_one_process_per_gpu_is_legal_under_mps() -> None:
    exclusive = replaced(HEALTHY, gpus=(replaced(GPU, compute_mode="exclusive_process"),), mps=True)
    assert [each.name for each in examine(exclusive, wants_gpus=True) if each.state != "ok"] == ["sharing"]


def test_the_command_looks_at_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("SOCKET_DIR", tmp_path / "s"), ("STATE_DIR", tmp_path), ("HTTP__PORT", 0)):
        monkeypatch.setenv(f"CANARYD_{name}", str(value))
    monkeypatch.setenv("CANARYD_WORKERS__GPUS", "off")
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    states = {each["name"]: each["state"] for each in document["checks"]}
    assert states == {
        "versions": "ok", "gpus": "skipped", "socket_dir": "warning", "state_dir": "ok", "pids": "skipped",
    }  # fmt: skip
    (tmp_path / "s").mkdir(mode=0o700)
    assert main(["doctor"]) == 0
    assert "socket_dir" in capsys.readouterr().out

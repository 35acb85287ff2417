"""The doctor's judgement: facts in, one line of advice for each thing out. No input or output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from canaryd.doctor.facts import Facts, Folder

NEEDED = {"torch": (2, 11), "triton": (3, 6), "pyzmq": (25,), "msgspec": (0, 18), "pydantic": (2, 7)}
NEEDED_FOR_GPUS = {"cuda-bindings": (12, 6), "nvidia-ml-py": (12, 560)}
LITTLE_SPACE = 256 << 20


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. `fix` is empty if nothing need be done."""

    name: str
    state: Literal["ok", "warning", "failed", "skipped"]
    said: str
    fix: str = ""


def examine(facts: Facts, *, wants_gpus: bool) -> list[Check]:
    """Every check in reading order. `wants_gpus`: the configuration does not turn GPU workers off."""
    gpus = wants_gpus and bool(facts.gpus)
    checks = [*_versions(facts, gpus), _gpus(facts, wants_gpus)]
    if gpus:
        checks += [
            _same_gpus(facts),
            _ipc(facts),
            *_compute_modes(facts),
            _sharing(facts),
            *_ecc(facts),
            *_compiler(facts),
        ]
    return [*checks, _socket_dir(facts), _state_dir(facts), _processes(facts)]


def _check(name: str, state: Literal["ok", "warning", "failed", "skipped"], said: str, fix: str = "") -> Check:
    return Check(name=name, state=state, said=said, fix=fix)


def _versions(facts: Facts, gpus: bool) -> Iterator[Check]:
    needed = NEEDED | (NEEDED_FOR_GPUS if gpus else {})
    bad = []
    for name, least in needed.items():
        version = facts.packages.get(name)
        if version is None:
            bad.append(f"{name} is missing")
        elif tuple(map(int, re.findall(r"\d+", version)[: len(least)])) < least:
            bad.append(f"{name} {version} is older than {'.'.join(map(str, least))}")
    if bad:
        extra = '".[daemon,cuda]"' if gpus else '".[daemon]"'
        yield _check("versions", "failed", "; ".join(bad) + ".", f"pip install {extra}")
    else:
        known = [f"{name} {facts.packages[name]}" for name in needed] + [f"driver {facts.driver}"] * bool(facts.driver)
        yield _check("versions", "ok", ", ".join(known))


def _gpus(facts: Facts, wants_gpus: bool) -> Check:
    if not wants_gpus:
        return _check("gpus", "skipped", "workers.gpus is off: only pools in host memory are watched.")
    if facts.gpus:
        return _check("gpus", "ok", ", ".join(f"{each.name} {each.uuid}".strip() for each in facts.gpus))
    return _check(
        "gpus",
        "warning",
        f"No GPU is visible ({facts.gpus_error or 'the driver lists none'}): only pools in host memory can be watched.",
        "In a container: runtime class nvidia, NVIDIA_VISIBLE_DEVICES=all, NVIDIA_DRIVER_CAPABILITIES=compute,utility. "
        "Without GPUs: workers.gpus off.",
    )


def _same_gpus(facts: Facts) -> Check:
    if facts.cuda_error is not None:
        return _check(
            "cuda", "failed", f"CUDA does not start: {facts.cuda_error}.",
            "Give the container the driver's compute capability, and install a torch that is built for CUDA.",
        )  # fmt: skip
    unseen = [each.uuid for each in facts.gpus if each.uuid not in facts.cuda_uuids]
    if unseen:
        return _check(
            "cuda", "failed",
            f"The driver lists {', '.join(unseen)}, and CUDA sees {', '.join(facts.cuda_uuids) or 'none'}.",
            "Let NVIDIA_VISIBLE_DEVICES name the engine's GPUs; name them in workers.gpus by UUID.",
        )  # fmt: skip
    return _check("cuda", "ok", "CUDA sees the same GPUs by UUID.")


def _ipc(facts: Facts) -> Check:
    if facts.ipc_error is None:
        return _check(
            "ipc", "skipped", "Sharing memory between processes was not tried.", "Stop skipping it (--quick)."
        )
    if facts.ipc_error:
        return _check(
            "ipc", "failed", f"Memory of one process could not be opened by another: {facts.ipc_error}.",
            "Share the PID namespace (shareProcessNamespace: true), leave expandable_segments off, and do not use CUDA "
            "IPC under WSL or a vGPU without it.",
        )  # fmt: skip
    return _check("ipc", "ok", "One process opened memory of another.")


def _compute_modes(facts: Facts) -> Iterator[Check]:
    bad = [each for each in facts.gpus if each.compute_mode not in (None, "default")]
    for each in bad:
        single = each.compute_mode == "exclusive_process"
        if single and facts.mps:
            continue  # the MPS server is that one process
        yield _check(
            "compute mode", "failed",
            f"{each.uuid} is {each.compute_mode}: engine and canaryd cannot both use it.",
            f"nvidia-smi -i {each.uuid} -c DEFAULT",
        )  # fmt: skip
    if not bad:
        yield _check("compute mode", "ok", "Several processes may use each GPU.")


def _sharing(facts: Facts) -> Check:
    if facts.mps:
        return _check(
            "sharing", "warning", "MPS is in force: a fatal fault of one client ends all clients of that GPU.",
            "Run the daemon outside of MPS (unset CUDA_MPS_PIPE_DIRECTORY, or stop nvidia-cuda-mps-control).",
        )  # fmt: skip
    return _check("sharing", "ok", "Time slices: the driver isolates engine and canaryd from each other.")


def _ecc(facts: Facts) -> Iterator[Check]:
    without = [each.uuid for each in facts.gpus if each.ecc is False]
    if without:
        yield _check(
            "ecc", "warning", f"ECC is off on {', '.join(without)}: bits that flip are neither corrected nor counted.",
            "nvidia-smi -e 1, then reset the GPU or reboot.",
        )  # fmt: skip


def _compiler(facts: Facts) -> Iterator[Check]:
    if not facts.compiler:
        yield _check("compiler", "failed", "No C compiler is found, and Triton needs one.", "Install gcc, or set CC.")
    if not facts.cache_writable:
        yield _check(
            "cache", "failed", "Triton's cache cannot be written.", "Set TRITON_CACHE_DIR to a folder that can be."
        )


def _socket_dir(facts: Facts) -> Check:
    folder = facts.socket_dir
    if folder.mode is None:
        return _check(
            "socket_dir", "warning", f"{folder.path} is not there (the daemon makes it if it may).",
            f"mkdir -p -m 0700 {folder.path}, or run canaryd serve; engine and daemon must share it.",
        )  # fmt: skip
    if not folder.is_folder:
        return _check("socket_dir", "failed", f"{folder.path} is no directory.", "Name another in socket_dir.")
    if folder.owner != facts.user:
        return _check(
            "socket_dir", "failed", f"{folder.path} belongs to user {folder.owner}, this is user {facts.user}.",
            "Run the doctor as the daemon's user, or name another in socket_dir.",
        )  # fmt: skip
    if folder.mode & 0o077:
        return _check(
            "socket_dir", "failed", f"{folder.path} has mode {folder.mode:04o}, which lets others in.",
            f"chmod 0700 {folder.path}",
        )  # fmt: skip
    return _check("socket_dir", "ok", f"{folder.path} is private.")


def _state_dir(facts: Facts) -> Check:
    folder: Folder = facts.state_dir
    if folder.mode is None:
        return _check(
            "state_dir",
            "warning",
            f"{folder.path} is not there (the daemon makes it if it may).",
            f"mkdir -p -m 0700 {folder.path}",
        )
    if not folder.writable:
        return _check(
            "state_dir",
            "failed",
            f"{folder.path} cannot be written by user {facts.user}.",
            "Run the doctor as the daemon's user, or name another in state_dir.",
        )
    if folder.free_bytes < LITTLE_SPACE:
        return _check("state_dir", "warning", f"{folder.path} has {folder.free_bytes >> 20} MiB left.", "Free space.")
    return _check("state_dir", "ok", f"{folder.path} can be written.")


def _processes(facts: Facts) -> Check:
    share = "Share the PID namespace: shareProcessNamespace: true, or --pid with docker."
    if facts.hidden_engines:
        return _check(
            "pids", "failed",
            f"The processes of {', '.join(facts.hidden_engines)} are in another PID namespace: CUDA IPC "
            "may fail, and their restarts cannot be told from reconnections.", share,
        )  # fmt: skip
    if facts.is_first_process:
        return _check(
            "pids", "warning", "The daemon is process 1 of its PID namespace: an engine that is process 1 of its own "
            "collides with it in CUDA IPC.", share,
        )  # fmt: skip
    if facts.hidden_engines is None:
        return _check("pids", "skipped", "No daemon was there to ask which engines it can see.")
    return _check("pids", "ok", "Every attached engine's process is visible.")

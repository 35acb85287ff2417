"""A finding as a bundle for a public bug report. Everything in it is named here: what is not named stays at home."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import msgspec

from canaryd import __version__
from canaryd.config import Config
from canaryd.findings.finding import Finding

EXPORT_VERSION = 1
PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-ml-py", "pyzmq", "msgspec", "numpy", "transformers")
_FINDING = ("check", "opened", "last_seen", "count", "joined", "standing", "readers", "verdict", "why", "state")
_DETAIL = (
    "group",
    "slots",
    "slot_count",
    "pages",
    "position",
    "live",
    "op_age",
    "classification",
    "region",
    "regions",
    "byte_offset",
    "changed_bits",
    "changed_bit_count",
    "first_seen",
    "confirmed",
)
_ENGINE = (
    "state",
    "slots",
    "described_ratio",
    "unguarded_ratio",
    "pass_coverage_ratio",
    "pass_last_seconds",
    "pass_last_slots",
    "rows_open",
    "ops_open",
    "ops_stalled",
    "mismatches",
    "skipped",
    "suspects_dismissed",
    "reblessed",
    "message_gaps",
    "stamps_lost",
    "geometry",
)
_INFO = ("kind", "version", "client_version", "scheme", "table", "frees", "tiers", "dp", "pp", "tp", "cp")
_WORKER = ("state", "description", "restarts", "launches", "selftest_age", "selftest_failures")
_CONFIG = ("scheme", "watch", "selftest", "findings", "engines")


def bundle(finding: Finding, status: Mapping[str, Any] | None, config: Config) -> dict[str, Any]:
    """JSON values. No token, KV byte or sum of them, digest, handle, path, user, request id, engine or model name."""
    status = status or {}
    engine = _only(status.get("engines", ()), engine=finding.engine, gpu_uuid=finding.gpu_uuid)
    worker = _only(status.get("workers", ()), device=finding.gpu_uuid)
    return {
        "export_version": EXPORT_VERSION,
        "made": time.time(),
        "canaryd": __version__,
        "platform": {"python": platform.python_version(), "system": platform.system(), "kernel": platform.release()},
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "config": {name: value for name, value in config.model_dump(mode="json").items() if name in _CONFIG},
        "finding": {name: getattr(finding, name) for name in _FINDING} | {"detail": _picked(finding.detail, _DETAIL)},
        "gpu": None if finding.hardware is None else msgspec.to_builtins(finding.hardware),
        "engine": None if engine is None else _picked(engine, _ENGINE) | {"info": _picked(engine["info"], _INFO)},
        "worker": None if worker is None else _picked(worker, _WORKER),
        "status": {name: status.get(name) for name in ("overall", "uptime", "findings_open", "time")}
        | {"problems": [each["code"] for each in status.get("problems", ())]},
    }


def _picked(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _only(documents: Iterable[Mapping[str, Any]], **labels: str) -> Mapping[str, Any] | None:
    return next((each for each in documents if all(each.get(name) == value for name, value in labels.items())), None)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

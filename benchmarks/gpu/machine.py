"""What a run ran on."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def _output(*command: str) -> str:
    """What a command prints, or "unknown" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


def describe() -> dict[str, Any]:
    """GPU, driver, versions, commit (`CANARYD_COMMIT` where there is no checkout) and time."""
    import torch
    import triton

    commit = os.environ.get("CANARYD_COMMIT") or _output("git", "rev-parse", "HEAD")
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }

"""What needs CUDA, in processes of its own: prints one line of JSON.

`uuids` lists what CUDA sees. `ipc` allocates memory in this process and has another one open it; the handle, a right to
that memory, goes through the other's standard input only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from canaryd.errors import CanarydError
from canaryd.pool.cuda_driver import CudaCallFailed, cuda_driver

_BYTES = 2 << 20
_SECONDS = 60.0


def _uuids() -> dict[str, Any]:
    return {"uuids": cuda_driver().uuids()}


def _ipc() -> dict[str, Any]:
    import torch

    memory = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda")
    handle = cuda_driver().export_handle(0, memory.data_ptr())
    other = subprocess.run(
        [sys.executable, "-m", "canaryd.doctor.cuda_probe", "open"],
        input=handle.hex(),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    lines = other.stdout.splitlines()
    return (
        dict(json.loads(lines[-1])) if lines else {"error": f"the other process ended with status {other.returncode}"}
    )


def _open() -> dict[str, Any]:
    driver = cuda_driver()
    driver.close_handle(0, driver.open_handle(0, bytes.fromhex(sys.stdin.read())))
    return {}


def main() -> int:
    """Answer one question."""
    try:
        answer = {"uuids": _uuids, "ipc": _ipc, "open": _open}[sys.argv[1]]()
    except (CanarydError, CudaCallFailed, RuntimeError, AssertionError, OSError, subprocess.TimeoutExpired) as error:
        answer = {"error": str(error).splitlines()[0]}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

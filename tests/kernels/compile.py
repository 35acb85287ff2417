"""Compile Triton kernels for GPUs that this machine does not have.

`compile_kernels` starts one Python process without the interpreter (a process that interprets cannot compile) and
returns the size of each kernel's binary; this file is also that process's program.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

CAPABILITIES = (80, 90, 100)


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel as a launcher calls it.

    Args:
        module, kernel: where the jit function is.
        pointers: Triton types of the pointer parameters, `{"slots": "*i64"}`.
        constants: values of the constexpr parameters. All other parameters are int64.
        num_warps: as in the launch.
    """

    module: str
    kernel: str
    pointers: dict[str, str]
    constants: dict[str, int | bool] = field(default_factory=dict)
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What came out: `cubin_bytes` of `kernel` for compute capability `capability`, with `wide_copies` asynchronous
    copies of 16 bytes."""

    kernel: str
    capability: int
    cubin_bytes: int
    wide_copies: int


def compile_kernels(
    specs: Sequence[KernelSpec], *, cache: Path, capabilities: Sequence[int] = CAPABILITIES
) -> list[Compiled]:
    """Compile each kernel for each compute capability, `cache` being Triton's cache folder. Raises on any failure."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["TRITON_CACHE_DIR"] = str(cache)
    paths = [environment.get("PYTHONPATH", ""), str(root / "kernels"), str(root)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    job = {"specs": [asdict(spec) for spec in specs], "capabilities": list(capabilities)}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"compilation failed:\n{done.stdout}\n{done.stderr}")
    return [Compiled(**row) for row in json.loads(done.stdout)]


def _compile(spec: KernelSpec, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(spec.module), spec.kernel)
    kinds = {name: "constexpr" if name in spec.constants else "i64" for name in function.arg_names}
    signature = {**kinds, **spec.pointers}
    source = ASTSource(function, signature, spec.constants)
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(source, target=target, options={"num_warps": spec.num_warps})
    return Compiled(
        kernel=spec.kernel,
        capability=capability,
        cubin_bytes=len(binary.asm["cubin"]),
        wide_copies=binary.asm["ptx"].count("cp.async.cg.shared.global"),
    )


def main() -> None:
    job = json.load(sys.stdin)
    specs = [KernelSpec(**spec) for spec in job["specs"]]
    rows = [asdict(_compile(spec, capability)) for spec in specs for capability in job["capabilities"]]
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()

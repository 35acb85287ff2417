"""What every launcher shares: the choice of backend, the device guard and the hook that counts launches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from canary_kernels.validation import fail

Backend = Literal["triton", "reference"]
"""How a launcher computes: the Triton kernels, or the vectorised torch reference."""

_observer: Callable[[str], None] | None = None


def set_launch_observer(observer: Callable[[str], None] | None) -> None:
    """Have `observer(kernel)` called with a launcher's kernel label after each successful launch; None removes it."""
    global _observer  # noqa: PLW0603 - one hook per process, like the validation observer
    _observer = observer


def record_launch(kernel: str) -> None:
    """Report one successful launch under its label; every launcher calls this last."""
    if _observer is not None:
        _observer(kernel)


@contextlib.contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Counts launches by label while the context is open; an observer that was set before goes on being called."""
    counts: Counter[str] = Counter()
    outer = _observer

    def observe(kernel: str) -> None:
        counts[kernel] += 1
        if outer is not None:
            outer(kernel)

    set_launch_observer(observe)
    try:
        yield counts
    finally:
        set_launch_observer(outer)


def resolve_backend(kernel: str, backend: Backend | None, tensor: torch.Tensor) -> Backend:
    """The backend to use: `backend` if given, else Triton for CUDA tensors and the reference for host tensors.

    Raises KernelArgumentError, in the name of `kernel`, for any other value.
    """
    if backend is None:
        return "triton" if tensor.is_cuda else "reference"
    if backend not in ("triton", "reference"):
        fail(kernel, "backend", "range", f"backend must be None, 'triton' or 'reference', got {backend!r}")
    return backend


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which Triton launches on `tensor`'s GPU; nothing for host tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()

"""The few driver calls that sharing GPU memory needs, through cuda-bindings."""

from __future__ import annotations

from typing import Protocol


class CudaDriver(Protocol):
    """The surface that export and import use."""

"""The two fingerprint schemes by name."""

from __future__ import annotations

from typing import Literal

Scheme = Literal["native", "sglang"]
"""`native`: keyed, order-free digest and affine chain. `sglang`: splitmix64 fold and chain of the in-engine canary."""

SCHEMES: tuple[Scheme, ...] = ("native", "sglang")

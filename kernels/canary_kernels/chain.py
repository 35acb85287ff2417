"""Chain hashes of token runs, on the host: heads, seeds, and the hashes before and after each token.

native: `h_0 = s(anchor ^ namespace)`, `m = s(s(token ^ key) ^ position)`, `h' = h*R + m` (mod 2^64), computed by one
wrapping prefix sum of `R^-(i+1) * m_i`. sglang: `h' = mix3(h, token, position)`, step by step, vectorised over runs.
"""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from canary_kernels.constants import ANCHOR, mix, signed
from canary_kernels.reference import chain as reference
from canary_kernels.scheme import Scheme

I64 = npt.NDArray[np.int64]


def chain_head(scheme: Scheme, namespace: int = 0) -> int:
    """The prev_hash of a row's first token, as int64 bits. Both schemes: `s(anchor ^ namespace)`, which for namespace
    0 is SGLang's head."""
    del scheme
    return signed(mix(ANCHOR ^ namespace))


@overload
def chain_hashes(
    scheme: Scheme, seeds: I64, tokens: I64, positions: I64, offsets: I64, key: int = 0
) -> tuple[I64, I64]: ...


@overload
def chain_hashes(
    scheme: Scheme,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    key: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def chain_hashes(  # noqa: PLR0917 - one column after the other, the same on host and device
    scheme: Scheme,
    seeds: I64 | torch.Tensor,
    tokens: I64 | torch.Tensor,
    positions: I64 | torch.Tensor,
    offsets: I64 | torch.Tensor,
    key: int = 0,
) -> tuple[I64, I64] | tuple[torch.Tensor, torch.Tensor]:
    """Chain hashes of k runs of tokens.

    Args:
        scheme: which chain.
        seeds: int64 [k], the hash before each run's first token.
        tokens, positions: int64 [n]. A negative position skips the token: the chain does not advance.
        offsets: int64 [k+1], run r is [offsets[r], offsets[r+1]); offsets[0] = 0, offsets[k] = n.
        key: the attachment's secret, any 64-bit integer (native only).

    Returns:
        prev_hash [n], the hash before each token, and after [n], the hash after it: numpy for numpy arguments, torch
        for torch arguments.
    """
    if isinstance(seeds, torch.Tensor):
        return reference.chain_hashes(
            scheme, seeds, _tensor(tokens), _tensor(positions), _tensor(offsets), key=signed(key)
        )
    before, after = reference.chain_hashes(
        scheme, _tensor(seeds), _tensor(tokens), _tensor(positions), _tensor(offsets), key=signed(key)
    )
    return before.numpy(), after.numpy()


def _tensor(values: I64 | torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    if not values.flags.writeable:  # torch cannot mark a tensor read-only, and warns about such arrays
        values = values.copy()
    return torch.from_numpy(values)

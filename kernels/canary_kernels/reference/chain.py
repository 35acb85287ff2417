"""Chain hashes in torch: a prefix sum for the native scheme, steps across runs for sglang."""

from __future__ import annotations

import torch

from canary_kernels.constants import CHAIN_STEP, CHAIN_STEP_INVERSE, signed
from canary_kernels.reference.mixing import mix, mix3
from canary_kernels.scheme import Scheme

_FACTOR = signed(CHAIN_STEP)
_INVERSE = signed(CHAIN_STEP_INVERSE)

_powers: dict[tuple[int, torch.device], torch.Tensor] = {}


def powers(base: int, count: int, device: torch.device) -> torch.Tensor:
    """base^0 … base^(count-1) mod 2^64, int64 [>= count]; kept per device and doubled when a longer one is needed."""
    table = _powers.get((base, device))
    if table is None:
        table = torch.tensor([1, base], dtype=torch.int64, device=device)
    while table.numel() < count:
        table = torch.cat([table, table * (table[-1] * base)])
    _powers[base, device] = table
    return table


def step(
    scheme: Scheme, before: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, *, key: int
) -> torch.Tensor:
    """The hash after one token, element by element on int64 tensors of one shape."""
    if scheme == "native":
        return before * _FACTOR + mix(mix(tokens ^ key) ^ positions)
    return mix3(before, tokens, positions)


def chain_hashes(
    scheme: Scheme,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    offsets: torch.Tensor,
    *,
    key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """prev_hash [n] and after [n] of `canary_kernels.chain.chain_hashes`; all tensors int64 on one device."""
    if scheme == "native":
        return _native(seeds, tokens, positions, offsets, key=key)
    return _sglang(seeds, tokens, positions, offsets)


def _native(
    seeds: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor, *, key: int
) -> tuple[torch.Tensor, torch.Tensor]:
    n = tokens.numel()
    if n == 0:
        return torch.empty_like(tokens), torch.empty_like(tokens)
    device = tokens.device
    runs = seeds.numel()
    lengths = offsets[1:] - offsets[:-1]
    term = mix(mix(tokens ^ key) ^ positions)
    if runs == n and bool((lengths == 1).all()):  # one token per run, as in a decode step
        after = seeds * _FACTOR + term
        return seeds.clone(), torch.where(positions < 0, seeds, after)
    starts = torch.repeat_interleave(offsets[:-1], lengths, output_size=n)
    counted = (positions >= 0).to(torch.int64)
    through = torch.cumsum(counted, 0)
    ahead = through - counted
    done = ahead - ahead[starts]  # tokens of this run that advanced the chain before this one
    limit = int(lengths.max()) + 1
    factor = powers(_FACTOR, limit, device)
    inverse = powers(_INVERSE, limit, device)
    scaled = inverse[done + 1] * term * counted
    sums = torch.cumsum(scaled, 0)
    base = torch.repeat_interleave(seeds, lengths, output_size=n) - (sums - scaled)[starts]
    before = factor[done] * (base + sums - scaled)
    after = torch.where(counted.bool(), before * _FACTOR + term, before)
    return before, after


def _sglang(
    seeds: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    before = torch.empty_like(tokens)
    after = torch.empty_like(tokens)
    lengths = offsets[1:] - offsets[:-1]
    # Longest first, so that the runs that are still going are always a prefix.
    lengths, order = torch.sort(lengths, descending=True)
    starts = offsets[:-1][order]
    state = seeds[order]
    going = torch.bincount(lengths).flip(0).cumsum(0).flip(0).tolist() if lengths.numel() else [0]
    for index in range(1, len(going)):
        active = int(going[index])
        item = starts[:active] + (index - 1)
        current = state[:active]
        before[item] = current
        position = positions[item]
        current = torch.where(position < 0, current, mix3(current, tokens[item], position))
        after[item] = current
        state[:active] = current
    return before, after

"""Chain hashes in torch: a prefix sum for the native scheme, steps across runs for sglang."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from canary_kernels.constants import (
    CHAIN_STEP,
    CHAIN_STEP_INVERSE,
    MASK64,
    SPLITMIX_MUL_1,
    SPLITMIX_MUL_2,
    signed,
)
from canary_kernels.constants import mix as mix_integer
from canary_kernels.reference.mixing import mix, mix3
from canary_kernels.scheme import Scheme

_FACTOR = signed(CHAIN_STEP)
_INVERSE = signed(CHAIN_STEP_INVERSE)

_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(SPLITMIX_MUL_1), np.uint64(SPLITMIX_MUL_2))
_FEW_RUNS = 8
"""Up to so many runs plain integers are faster than a numpy step across them."""

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
    """Serial by definition, so on the host: numpy steps across runs while many of them go on, then plain integers."""
    token, position, bounds = (column.cpu().numpy() for column in (tokens, positions, offsets))
    lengths = np.diff(bounds)
    order = np.argsort(-lengths, kind="stable")  # longest first, so that the runs that go on are always a prefix
    lengths, starts = lengths[order], bounds[:-1][order]
    state = seeds.cpu().numpy()[order].view(np.uint64)
    before = np.empty(token.size, dtype=np.uint64)
    after = np.empty(token.size, dtype=np.uint64)
    longest = int(lengths[0]) if lengths.size else 0
    going = np.searchsorted(-lengths, -np.arange(longest), side="left").tolist()
    done = 0
    while done < longest and going[done] > _FEW_RUNS:
        active = going[done]
        item = starts[:active] + done
        state = state[:active]
        before[item] = state
        at = position[item]
        state = np.where(at < 0, state, _mix3(state, token[item].view(np.uint64), at.view(np.uint64)))
        after[item] = state
        done += 1
    for run in range(going[done] if done < longest else 0):
        first, last = int(starts[run]) + done, int(starts[run] + lengths[run])
        before[first:last], after[first:last] = _one_run(
            int(state[run]), token[first:last].tolist(), position[first:last].tolist()
        )
    return (
        torch.from_numpy(before.view(np.int64)).to(tokens.device),
        torch.from_numpy(after.view(np.int64)).to(tokens.device),
    )


def _one_run(state: int, tokens: list[int], positions: list[int]) -> tuple[list[int], list[int]]:
    """Hashes before and after each token, on unsigned Python integers."""
    before, after = [], []
    for token, position in zip(tokens, positions, strict=True):
        before.append(state)
        if position >= 0:
            state = mix_integer(mix_integer(mix_integer(state) ^ (token & MASK64)) ^ position)
        after.append(state)
    return before, after


def _mix3(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64], c: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return _mix(_mix(_mix(a) ^ b) ^ c)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])

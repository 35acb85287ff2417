"""Chain hashes on the host in plain numpy: those of `canary_kernels.chain`, at the size of an engine's step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from canary_kernels.chain import chain_hashes
from canary_kernels.constants import CHAIN_STEP, CHAIN_STEP_INVERSE, MASK64, SPLITMIX_MUL_1, SPLITMIX_MUL_2, mix
from canary_kernels.scheme import Scheme

from canaryd.watch.burst import I64

U64 = npt.NDArray[np.uint64]

BLOCK = 1 << 16
"""Tokens of the native chain per pass: bounds its scratch and its tables of powers."""

_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(SPLITMIX_MUL_1), np.uint64(SPLITMIX_MUL_2))
_STEP = np.uint64(CHAIN_STEP)
_FEW_STEPS = 16
"""A serial chain of few long runs is computed faster by plain integers than by one array operation per step."""


class Chains:
    """The chain of one attachment.

    Args:
        scheme: fingerprint scheme.
        key: the attachment's secret, any 64-bit integer (native only).
    """

    def __init__(self, scheme: Scheme, key: int) -> None:
        self._scheme: Scheme = scheme
        self._key = key
        self._native_key = np.uint64(key & MASK64)
        self._powers = _powers(CHAIN_STEP, 1)
        self._inverses = _powers(CHAIN_STEP_INVERSE, 1)

    def step(self, before: I64, tokens: I64, positions: I64) -> I64:
        """The hash after one token, of n runs: all int64 [n], positions >= 0."""
        if self._scheme == "sglang":
            return chain_hashes("sglang", before, tokens, positions, np.arange(before.size + 1))[1]
        after = self._terms(tokens, positions)
        after += before.view(np.uint64) * _STEP
        return after.view(np.int64)

    def runs(self, seeds: I64, tokens: I64, positions: I64, offsets: I64) -> tuple[I64, I64]:
        """Hash before and after each token of k runs, see `canary_kernels.chain.chain_hashes`; positions >= 0."""
        if self._scheme == "sglang":
            if tokens.size > _FEW_STEPS * seeds.size:
                return _step_by_step(seeds, tokens, positions, offsets)
            return chain_hashes("sglang", seeds, tokens, positions, offsets)
        if tokens.size <= BLOCK:
            return self._native(seeds, tokens, positions, offsets)
        before, after = np.empty_like(tokens), np.empty_like(tokens)
        for first in range(0, tokens.size, BLOCK):
            last = min(first + BLOCK, tokens.size)
            begin = int(np.searchsorted(offsets, first, side="right")) - 1
            end = int(np.searchsorted(offsets, last, side="left"))
            own = seeds[begin:end].copy()
            if offsets[begin] < first:
                own[0] = after[first - 1]
            within = np.clip(offsets[begin : end + 1] - first, 0, last - first)
            before[first:last], after[first:last] = self._native(own, tokens[first:last], positions[first:last], within)
        return before, after

    def _native(self, seeds: I64, tokens: I64, positions: I64, offsets: I64) -> tuple[I64, I64]:
        """One wrapping prefix sum over all runs: with S[g] the sum of R^-(t+1) * m_t over t < g, the hash before item g
        of a run that starts at s is R^g * (R^-s * seed + S[g] - S[s])."""
        n = tokens.size
        while self._powers.size <= n:
            self._powers = _powers(CHAIN_STEP, 2 * self._powers.size)
            self._inverses = _powers(CHAIN_STEP_INVERSE, 2 * self._inverses.size)
        terms = self._terms(tokens, positions)
        sums = np.zeros(n + 1, dtype=np.uint64)
        np.cumsum(terms * self._inverses[1 : n + 1], out=sums[1:])
        starts = offsets[:-1]
        bases = self._inverses[starts] * seeds.view(np.uint64) - sums[starts]
        if seeds.size == 1:
            sums += bases
        else:
            sums[:n] += np.repeat(bases, offsets[1:] - starts)
        before = sums[:n] * self._powers[:n]
        terms += before * _STEP
        return before.view(np.int64), terms.view(np.int64)

    def _terms(self, tokens: I64, positions: I64) -> U64:
        """`s(s(token ^ key) ^ position)`, [n]."""
        mixed = tokens.view(np.uint64) ^ self._native_key
        scratch = np.empty_like(mixed)
        _mix(mixed, scratch)
        mixed ^= positions.view(np.uint64)
        _mix(mixed, scratch)
        return mixed


def _powers(base: int, count: int) -> U64:
    """base^0 … base^(count-1) mod 2^64; `count` a power of two."""
    table = np.ones(1, dtype=np.uint64)
    while table.size < count:
        table = np.concatenate([table, table * np.uint64(pow(base, table.size, 1 << 64))])
    return table


def _mix(x: U64, scratch: U64) -> None:
    """`s(x)` in place, [n]."""
    np.right_shift(x, _SHIFTS[0], out=scratch)
    x ^= scratch
    x *= _FACTORS[0]
    np.right_shift(x, _SHIFTS[1], out=scratch)
    x ^= scratch
    x *= _FACTORS[1]
    np.right_shift(x, _SHIFTS[2], out=scratch)
    x ^= scratch


def _step_by_step(seeds: I64, tokens: I64, positions: I64, offsets: I64) -> tuple[I64, I64]:
    """The sglang chain, which is serial, so this loops over tokens."""
    bounds = offsets.tolist()
    hashes = []
    for seed, first, last in zip(seeds.view(np.uint64).tolist(), bounds[:-1], bounds[1:], strict=True):
        state = seed
        for token, position in zip(
            tokens[first:last].view(np.uint64).tolist(), positions[first:last].tolist(), strict=True
        ):
            hashes.append(state)
            state = mix(mix(mix(state) ^ token) ^ position)
        hashes.append(state)
    through = np.array(hashes, dtype=np.uint64)
    index = np.arange(tokens.size) + np.repeat(np.arange(seeds.size), np.diff(offsets))
    before = through[index].view(np.int64)
    return before, through[index + 1].view(np.int64)

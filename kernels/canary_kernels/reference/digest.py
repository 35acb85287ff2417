"""Digest and sum of slots on the host: the reference, and the backend of host pools.

Rows are gathered by torch into two small scratch buffers and mixed there in place by numpy, which multiplies 64-bit
integers faster than torch and shifts unsigned ones logically. A portion of the work is a few slots in all regions: it
stays in the second-level cache from the gather to the sums, and costs a score of calls. No loop over slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from canary_kernels.constants import CHAIN_STEP, SPLITMIX_MUL_1, SPLITMIX_MUL_2, WORD_STEP, mix, signed
from canary_kernels.layout import GroupLayout
from canary_kernels.reference.mixing import mix as mix_tensor
from canary_kernels.reference.nonfinite import any_nonfinite
from canary_kernels.reference.rows import I64, U64, Portion, RowBatch, row_batches
from canary_kernels.scheme import Scheme

U8 = npt.NDArray[np.uint8]

SCRATCH_WORDS: dict[Scheme, int] = {"native": 1 << 15, "sglang": 1 << 18}
"""8-byte words of one of the two scratch buffers (256 KiB and 2 MiB): the native digest wants to stay in the cache, the
fold wants many rows per step. A single row that is longer makes them larger."""
_MOST_SLOTS = 4096
"""Most slots digested at once, so that index vectors stay small too."""

_SLOTS = 128
"""Slots that a portion holds before it holds several regions: few regions at a time cost the fewest page walks."""

_MOST_PORTIONS = 256

# 0-d arrays: numpy converts neither them nor their dtype, which a small portion would feel
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.array(bits, dtype=np.uint64) for bits in (30, 27, 31))
_MUL_1, _MUL_2 = (np.array(factor, dtype=np.uint64) for factor in (SPLITMIX_MUL_1, SPLITMIX_MUL_2))


@dataclass
class _Outputs:
    """What one chunk of slots fills, on the host: digests, sums [n], and if wanted tops [n, R], nonfinite [n]."""

    digests: I64
    sums: I64
    tops: U8 | None
    nonfinite: U8 | None

    def columns(self) -> tuple[I64 | U8 | None, ...]:
        """All four, in order."""
        return self.digests, self.sums, self.tops, self.nonfinite

    def zeros_like(self, n: int) -> _Outputs:
        """Zeros for `n` slots, for what is wanted here."""
        return _Outputs(
            np.zeros(n, dtype=np.int64),
            np.zeros(n, dtype=np.int64),
            None if self.tops is None else np.zeros((n, self.tops.shape[1]), dtype=np.uint8),
            None if self.nonfinite is None else np.zeros(n, dtype=np.uint8),
        )


@dataclass
class HostDigest:
    """Tables, keys and scratch of one layout, used for every digest of the group. Not thread-safe.

    Memory on a GPU is gathered there and mixed on the host, for comparisons in tests.
    """

    layout: GroupLayout
    _batches: list[tuple[RowBatch, torch.Tensor]] = field(init=False)
    _scratch: torch.Tensor = field(default_factory=lambda: torch.empty((2, 0), dtype=torch.int64), init=False)
    _portions: dict[tuple[int, int, int], Portion] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        word_keys, region_keys = keys(self.layout, torch.device("cpu"))
        self._batches = [
            (batch, (region_keys[batch.regions].unsqueeze(1) ^ word_keys[: batch.words]).view(-1))
            for batch in row_batches(self.layout)
        ]

    def __call__(  # noqa: PLR0917 - inputs, outputs, scheme
        self,
        slots: torch.Tensor,
        digests: torch.Tensor,
        sums: torch.Tensor,
        region_bytes: torch.Tensor | None,
        scheme: Scheme,
        nonfinite: torch.Tensor | None = None,
    ) -> None:
        """Fills digests [n], sums [n] and, if given, region_bytes [n, R] and nonfinite [n] (uint8) for slots [n]."""
        if slots.device.type != "cpu":
            on_host = digests.cpu(), sums.cpu()
            optional = [None if out is None else out.cpu() for out in (region_bytes, nonfinite)]
            self(slots.cpu(), *on_host, optional[0], scheme, optional[1])
            for target, filled in zip((digests, sums, region_bytes, nonfinite), (*on_host, *optional), strict=True):
                if target is not None and filled is not None:
                    target.copy_(filled)
            return
        outs = _Outputs(
            digests.numpy(),
            sums.numpy(),
            None if region_bytes is None else region_bytes.numpy(),
            None if nonfinite is None else nonfinite.numpy(),
        )
        numbers: I64 = slots.numpy()
        for first in range(0, numbers.size, _MOST_SLOTS):
            wanted = numbers[first : first + _MOST_SLOTS]
            valid = wanted.view(np.uint64) < self.layout.num_slots
            if not valid.all():
                wanted = np.where(valid, wanted, 0)
            order: I64 | slice = np.argsort(wanted) if wanted.size > _SLOTS else slice(None)
            found = outs.zeros_like(wanted.size)
            self._chunk(wanted[order], found, scheme)
            for out, part in zip(outs.columns(), found.columns(), strict=True):
                if out is not None and part is not None:
                    part[order] = part.copy()
                    part[~valid] = 0
                    out[first : first + wanted.size] = part

    def _chunk(self, slots: I64, out: _Outputs, scheme: Scheme) -> None:
        """Fills `out`, zero before, for slots that are all in range."""
        page, offset = np.divmod(slots, self.layout.page_size)
        folds = np.zeros((len(self.layout.regions), slots.size), dtype=np.uint64) if scheme == "sglang" else None
        for number, (batch, batch_keys) in enumerate(self._batches):
            first_rows = page * batch.page_rows + offset * batch.slot_rows
            for some, part in _parts(batch.regions.size, slots.size, batch.words, SCRATCH_WORDS[scheme]):
                portion = self._portion(number, some, part.stop - part.start)
                portion.gather(first_rows[part])
                torch.sum(portion.words, 1, out=portion.totals)
                out.sums[part] += portion.totals.numpy()
                if out.nonfinite is not None and batch.rule is not None:
                    out.nonfinite[part] |= any_nonfinite(portion.x, portion.y, batch.rule, part.stop - part.start)
                if folds is not None:
                    fold = _fold(portion.x.reshape(-1, batch.words), portion.y)
                    folds[portion.regions, part] = fold.reshape(-1, portion.regions.size).T
                    continue
                portion.words.bitwise_xor_(batch_keys[some.start * batch.words : some.stop * batch.words])
                _mix_in_place(portion.x, portion.y)
                if out.tops is not None:
                    shares = np.add.reduce(portion.x.reshape(-1, portion.regions.size, batch.words), 2)
                    out.tops[part, portion.regions] = shares >> np.uint64(56)
                torch.sum(portion.words, 1, out=portion.totals)
                out.digests[part] += portion.totals.numpy()
        if folds is not None:
            _fold_total(folds, out)
            self._drop_scratch()  # that of the fold is large: groups would add up

    def _portion(self, number: int, some: slice, slots: int) -> Portion:
        """The portion of batch `number`, made once as long as the scratch does not grow."""
        batch = self._batches[number][0]
        size = slots * (some.stop - some.start) * batch.words
        if self._scratch.shape[1] < size or len(self._portions) >= _MOST_PORTIONS:
            self._drop_scratch()
            self._scratch = torch.empty((2, size), dtype=torch.int64)
        key = (number, some.start, slots)
        if key not in self._portions:
            self._portions[key] = Portion.of(batch, some, slots, self._scratch)
        return self._portions[key]

    def _drop_scratch(self) -> None:
        self._portions.clear()
        self._scratch = torch.empty((2, 0), dtype=torch.int64)


def keys(layout: GroupLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """word_keys [W] and region_keys [R], int64: `key(r, j) = region_keys[r] ^ word_keys[j]`."""
    longest = max(region.words for region in layout.regions)
    numbers = torch.arange(1, longest + 1, dtype=torch.int64, device=device)
    words = mix_tensor(numbers * signed(WORD_STEP))
    regions = [signed(mix((number + 1) * CHAIN_STEP)) for number in range(len(layout.regions))]
    return words, torch.tensor(regions, dtype=torch.int64, device=device)


def _parts(regions: int, slots: int, words: int, capacity: int) -> Iterator[tuple[slice, slice]]:
    """Splits regions x slots into portions of at most `capacity` words (one row at least)."""
    together = min(regions, max(1, capacity // (words * min(slots, _SLOTS))))
    for start in range(0, regions, together):
        some = slice(start, min(start + together, regions))
        fit = max(1, capacity // ((some.stop - some.start) * words))
        even = -(-slots // -(-slots // fit))
        for first in range(0, slots, even):
            yield some, slice(first, min(first + even, slots))


def _mix_in_place(words: U64, shifted: U64) -> None:
    """words = s(words); `shifted` is scratch of the same size."""
    np.right_shift(words, _SHIFT_1, shifted)
    np.bitwise_xor(words, shifted, words)
    np.multiply(words, _MUL_1, words)
    np.right_shift(words, _SHIFT_2, shifted)
    np.bitwise_xor(words, shifted, words)
    np.multiply(words, _MUL_2, words)
    np.right_shift(words, _SHIFT_3, shifted)
    np.bitwise_xor(words, shifted, words)


def _fold(words: U64, spare: U64) -> U64:
    """`acc = s(acc ^ word)` along the words of each row: [rows] from [rows, words]; serial along the words, vectorised
    across rows. `spare` is overwritten."""
    columns = spare.reshape(words.shape[1], words.shape[0])
    torch.from_numpy(columns.view(np.int64)).copy_(torch.from_numpy(words.view(np.int64)).T)
    state = np.zeros(words.shape[0], dtype=np.uint64)
    shifted = np.empty_like(state)
    for column in columns:
        np.bitwise_xor(state, column, state)
        _mix_in_place(state, shifted)
    return state


def _fold_total(folds: U64, out: _Outputs) -> None:
    """digest = s(digest ^ fold) over the regions' folds [R, n] in order, from 0."""
    total = out.digests.view(np.uint64)
    spare = np.empty_like(total)
    for fold in folds:
        np.bitwise_xor(total, fold, total)
        _mix_in_place(total, spare)
    if out.tops is not None:
        out.tops[:] = (folds >> np.uint64(56)).T

"""The write kernel of the daemon's own path: 64-byte records, with the chain computed inside each run."""

from __future__ import annotations

import torch

from canary_kernels.checks import check_records, check_vectors
from canary_kernels.constants import signed
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.reference import stamp as reference
from canary_kernels.scheme import Scheme


def launch_stamp(
    *,
    records: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    item_offsets: torch.Tensor,
    seeds: torch.Tensor,
    tokens: torch.Tensor,
    generations: torch.Tensor,
    digests: torch.Tensor,
    sums: torch.Tensor,
    scheme: Scheme = "native",
    key: int = 0,
    backend: Backend | None = None,
) -> None:
    """Writes the records of n items of k runs.

    Args:
        records: int64 [num_slots, 8], see `canary_kernels.records`.
        slots, positions, tokens, generations, digests, sums: int64 [n]. A slot outside [0, num_slots) or a negative
            position is skipped: nothing is stored and the chain does not advance. Token -1 is unknown; its record
            carries `CHAIN_UNKNOWN`. Slots of one launch must differ: of two items with one slot fields may mix.
        item_offsets: int64 [k+1]; run r has items [item_offsets[r], item_offsets[r+1]); from 0 to n, not
            decreasing.
        seeds: int64 [k], the hash before each run's first token.
        key: secret of the native chain, any 64-bit integer.

    Raises:
        KernelArgumentError: an argument has a wrong dtype, shape or device.
    """
    n = slots.numel()
    k = seeds.numel()
    check_records("stamp", records)
    check_vectors(
        "stamp",
        records,
        "records",
        {
            "slots": (slots, n),
            "positions": (positions, n),
            "item_offsets": (item_offsets, k + 1),
            "seeds": (seeds, k),
            "tokens": (tokens, n),
            "generations": (generations, n),
            "digests": (digests, n),
            "sums": (sums, n),
        },
    )
    if n == 0:
        return
    if resolve_backend("stamp", backend, records) == "triton":
        import canary_kernels.device.stamp as kernels

        run = kernels.stamp
    else:
        run = reference.stamp
    with device_guard(records):
        run(
            records=records,
            slots=slots,
            positions=positions,
            item_offsets=item_offsets,
            seeds=seeds,
            tokens=tokens,
            generations=generations,
            digests=digests,
            sums=sums,
            scheme=scheme,
            key=signed(key),
        )
    record_launch("write")

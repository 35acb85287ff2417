"""The write kernel in torch; the arguments are those of the launcher, already checked."""

from __future__ import annotations

import torch

from canary_kernels.constants import CHAIN_HEAD, signed
from canary_kernels.context import FailReason, VerifyOrWriteContext, WritePlan, hashed_sources, slot_limit
from canary_kernels.reference.mixing import mix3
from canary_kernels.reference.real_kv import fold_sources
from canary_kernels.reference.records import load_records, next_hashes, record_rows, store_records

_OUT_OF_RANGE = FailReason.SLOT_OUT_OF_RANGE.value


def run_canary_write(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
) -> None:
    """See `launch_canary_write_kernel`. Serial over a request's tokens, vectorised over requests and slots."""
    buffer = context.canary_buf
    sources = hashed_sources(context)
    context.kernel_run_counter.add_(1)
    limit = slot_limit(buffer.shape[0], sources)
    kind = int(context.kernel_kind)

    count = max(0, min(int(plan.write_num_valid_reqs[0]), plan.write_seed_slot_indices.shape[0]))
    starts, ends = plan.write_offsets[:count], plan.write_offsets[1 : count + 1]
    sound = (starts >= 0) & (starts <= ends) & (ends <= input_ids.shape[0])
    rows = [_rows(kind, torch.full_like(starts[~sound], -1), bits=_OUT_OF_RANGE)]
    starts, ends, seeds = starts[sound], ends[sound], plan.write_seed_slot_indices[:count][sound]

    seeded = (seeds >= 0) & (seeds < buffer.shape[0])
    seed_positions = torch.zeros_like(seeds)
    seed_positions[seeded] = load_records(buffer, seeds[seeded])[:, 1]
    bad_seeds = seeds[seeds >= buffer.shape[0]]
    rows.append(_rows(kind, bad_seeds, chain_hash=signed(CHAIN_HEAD), bits=_OUT_OF_RANGE))

    request, index, hashes, previous = _walk_chains(
        starts=starts,
        ends=ends,
        hashes=next_hashes(buffer, seeds),
        last_positions=seed_positions,
        input_ids=input_ids,
        positions=positions,
        stored=(out_cache_loc >= 0) & (out_cache_loc < limit),
    )
    slots, token, position = out_cache_loc[index], input_ids[index], positions[index]
    stored = (slots >= 0) & (slots < limit)
    common = {"position": position, "token": token, "chain_hash": hashes}
    rows.append(_rows(kind, slots, bits=_OUT_OF_RANGE, **common)[slots >= limit])
    if expected_input_tokens is not None and expected_input_positions is not None:
        want_token, want_position = expected_input_tokens[index], expected_input_positions[index]
        bits = (token != want_token) * FailReason.WRITE_TOKEN_MISMATCH.value
        bits |= (position != want_position) * FailReason.WRITE_POSITION_MISMATCH.value
        mismatches = _rows(kind, slots, expected_token=want_token, aux=want_position, bits=bits, **common)
        rows.append(mismatches[stored & (bits != 0)])
    if int(context.enable_chain_position_assert[0]) != 0:
        bit = FailReason.WRITE_POSITION_MISMATCH.value
        jumps = _rows(kind, slots, expected_token=token, aux=previous + 1, bits=bit, **common)
        rows.append(jumps[stored & seeded[request] & (position != previous + 1)])
    record_rows(context, torch.cat(rows))

    index, hashes = index[stored], hashes[stored]
    context.slot_run_counter.add_(index.shape[0])
    winner = _last_writers(out_cache_loc[index], index)
    index, hashes = index[winner], hashes[winner]
    slots = out_cache_loc[index]
    records = torch.stack((input_ids[index], positions[index], hashes, fold_sources(sources, slots)), 1)
    store_records(buffer, slots, records)


def _walk_chains(
    *,
    starts: torch.Tensor,
    ends: torch.Tensor,
    hashes: torch.Tensor,
    last_positions: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    stored: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk all requests side by side: for each of their tokens its request, its index, and the chain hash and the
    position before it. Tokens that are not stored do not advance; four int64 [n]."""
    steps: list[torch.Tensor] = [torch.empty((4, 0), dtype=torch.int64, device=starts.device)]
    for step in range(int((ends - starts).max()) if starts.numel() else 0):
        request = (starts + step < ends).nonzero()[:, 0]
        index = starts[request] + step
        steps.append(torch.stack((request, index, hashes[request], last_positions[request])))
        request, index = request[stored[index]], index[stored[index]]
        hashes[request] = mix3(hashes[request], input_ids[index], positions[index])
        last_positions[request] = positions[index]
    request, index, before, previous = torch.cat(steps, 1)
    return request, index, before, previous


def _last_writers(slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Which entry writes each slot: the one with the highest token index. Positions in `slots`, int64."""
    order = tokens.argsort(stable=True)
    order = order[slots[order].argsort(stable=True)]
    ordered = slots[order]
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]


def _rows(
    kind: int,
    slots: torch.Tensor,
    *,
    position: torch.Tensor | int = 0,
    token: torch.Tensor | int = 0,
    expected_token: torch.Tensor | int = -1,
    chain_hash: torch.Tensor | int = 0,
    aux: torch.Tensor | int = 0,
    bits: torch.Tensor | int,
) -> torch.Tensor:
    """Violation rows, int64 [n, 8], one per slot."""
    rows = torch.empty((slots.shape[0], 8), dtype=torch.int64, device=slots.device)
    for column, value in enumerate((kind, slots, position, token, expected_token, chain_hash, aux, bits)):
        rows[:, column] = value
    return rows

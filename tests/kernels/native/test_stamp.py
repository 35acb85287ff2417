"""Records: every field, the chain inside a run, skipped items, and SGLang's own write kernel beside it."""

from __future__ import annotations

import native_oracle as oracle
import pytest
import torch
from canary_kernels import (
    CHAIN_UNKNOWN,
    STAMPED,
    CanaryLaunchTag,
    DigestTable,
    GroupLayout,
    KernelArgumentError,
    RealKvHashMode,
    RealKvSource,
    Region,
    VerifyOrWriteContext,
    WritePlan,
    chain_head,
    launch_canary_write_kernel,
    launch_digest,
    launch_stamp,
)
from native_layouts import poisoned


def stamp(backend, device, records, **columns):
    scheme, key = columns.pop("scheme"), columns.pop("key")
    launch_stamp(
        records=records,
        scheme=scheme,
        key=key,
        backend=backend,
        **{name: torch.tensor(values, dtype=torch.int64, device=device) for name, values in columns.items()},
    )


@pytest.mark.parametrize("lengths", [[1] * 9, [0, 3, 0, 600, 1], [257]])
def test_records_are_the_oracles(lengths, scheme, backend, device, generator, ran):
    if scheme == "sglang" and backend == "triton" and device == "cpu":
        lengths = [min(length, 40) for length in lengths]  # one interpreted step per item
    n = sum(lengths)
    num_slots = n + 10

    def draw(low, high, count=n):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    slots = torch.randperm(num_slots, generator=generator)[:n].tolist()
    for wild in (-1, num_slots, (1 << 63) - 1):
        slots[draw(0, n, 1)[0]] = wild
    positions = draw(0, 5000)
    positions[draw(0, n, 1)[0]] = -1
    tokens = draw(-1, 1 << 20)
    columns = {
        "tokens": tokens,
        "generations": draw(0, 1 << 40),
        "digests": draw(-(1 << 62), 1 << 62),
        "sums": draw(-(1 << 62), 1 << 62),
    }
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    seeds = draw(-(1 << 62), 1 << 62, len(lengths))
    secret = draw(0, 1 << 62, 1)[0] << 1
    records = poisoned(num_slots, 8, device=device)
    wanted = records.tolist()
    for run in range(len(lengths)):
        part = range(offsets[run], offsets[run + 1])
        live = [0 <= slots[item] < num_slots and positions[item] >= 0 for item in part]
        known = [positions[item] if alive else -1 for item, alive in zip(part, live, strict=True)]
        steps = oracle.chain(scheme, seeds[run], [tokens[item] for item in part], known, secret)
        for item, alive, (before, _) in zip(part, live, steps, strict=True):
            if alive:
                flags = STAMPED | (CHAIN_UNKNOWN if tokens[item] < 0 else 0)
                wanted[slots[item]] = [
                    tokens[item],
                    positions[item],
                    before,
                    columns["digests"][item],
                    columns["sums"][item],
                    columns["generations"][item],
                    flags,
                    wanted[slots[item]][3],  # what the record held as its digest before
                ]
    stamp(
        backend,
        device,
        records,
        slots=slots,
        positions=positions,
        item_offsets=offsets,
        seeds=seeds,
        scheme=scheme,
        key=secret,
        **columns,
    )
    assert records.tolist() == wanted
    assert (ran["stamp_kernel"] > 0) == (backend == "triton")


@pytest.mark.parametrize("sources", [1, 4])
def test_sglang_records_are_those_of_the_contracts_write_kernel(sources, backend, device, generator):
    """Token, position, chain and fold agree, byte for byte, with `launch_canary_write_kernel` over the same sources."""
    page_size, size, num_pages = 4, 48, 6
    num_slots = page_size * num_pages
    memory = torch.randint(0, 256, (sources, num_pages, page_size * size), dtype=torch.uint8, generator=generator)
    memory = memory.to(device)
    group = GroupLayout(
        regions=tuple(
            Region(
                memory=memory.view(-1),
                offset=number * num_slots * size,
                page_stride=page_size * size,
                slot_stride=size,
                piece_bytes=size,
            )
            for number in range(sources)
        ),
        num_pages=num_pages,
        page_size=page_size,
    )
    offsets = torch.tensor([0, 5, 5, 17], device=device)
    slots = torch.randperm(num_slots, generator=generator)[:17].to(device)
    tokens = torch.randint(0, 1 << 17, (17,), generator=generator).to(device)
    positions = torch.tensor([*range(5), *range(12)], device=device)
    buffer = torch.zeros((num_slots, 32), dtype=torch.uint8, device=device)
    one = {"dtype": torch.int64, "device": device}
    launch_canary_write_kernel(
        context=VerifyOrWriteContext(
            canary_buf=buffer,
            kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
            violation_ring=torch.zeros((4, 8), **one),
            violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
            slot_run_counter=torch.zeros(1, **one),
            kernel_run_counter=torch.zeros(1, **one),
            real_kv_sources=tuple(
                RealKvSource(tensor=rows, page_size=page_size, num_bytes_per_token=size, read_bytes=size)
                for rows in memory
            ),
            real_kv_hash_mode=RealKvHashMode.ALL,
            enable_chain_position_assert=torch.zeros(1, dtype=torch.int32, device=device),
        ),
        plan=WritePlan(
            write_offsets=offsets,
            write_seed_slot_indices=torch.full((3,), -1, **one),
            write_num_valid_reqs=torch.tensor([3], dtype=torch.int32, device=device),
        ),
        input_ids=tokens,
        positions=positions,
        out_cache_loc=slots,
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
        backend=backend,
    )
    digests, sums = poisoned(17, device=device), poisoned(17, device=device)
    launch_digest(table=DigestTable(group, "sglang"), slots=slots, digests_out=digests, sums_out=sums, backend=backend)
    records = torch.zeros((num_slots, 8), **one)
    launch_stamp(
        records=records,
        slots=slots,
        positions=positions,
        item_offsets=offsets,
        seeds=torch.full((3,), chain_head("sglang"), **one),
        tokens=tokens,
        generations=torch.ones(17, **one),
        digests=digests,
        sums=sums,
        scheme="sglang",
        backend=backend,
    )
    assert records[slots, :4].tolist() == buffer.view(torch.int64)[slots].tolist()


def test_runs_beyond_the_items_read_nothing(device, ran):
    """Offsets that leave the columns are cut at them: the kernel reads no token that is not there."""
    guarded = torch.full((64,), 7, dtype=torch.int64, device=device)
    records = poisoned(64, 8, device=device)
    columns = dict.fromkeys(("slots", "positions", "tokens", "generations", "digests", "sums"), guarded[16:20])
    columns["slots"].copy_(torch.arange(4))
    guarded[20:].copy_(torch.arange(20, 64))
    launch_stamp(
        records=records,
        item_offsets=torch.tensor([-3, 2, 40], device=device),
        seeds=torch.tensor([5, 6], device=device),
        backend="triton",
        **columns,
    )
    assert ran["stamp_kernel"] == 1
    assert (records[4:] == poisoned(60, 8, device=device)).all()
    assert records[:4, 0].tolist() == [0, 1, 2, 3]


def test_bad_records_are_refused(backend):
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(KernelArgumentError, match=r"records must have 8 columns, got shape \(4, 4\)"):
        launch_stamp(
            records=torch.zeros((4, 4), dtype=torch.int64),
            slots=one,
            positions=one,
            item_offsets=torch.zeros(2, dtype=torch.int64),
            seeds=one,
            tokens=one,
            generations=one,
            digests=one,
            sums=one,
            backend=backend,
        )


def test_the_chain_of_an_empty_namespace_starts_at_the_anchor(backend, scheme):
    records = poisoned(1, 8)
    stamp(
        backend,
        "cpu",
        records,
        slots=[0],
        positions=[0],
        item_offsets=[0, 1],
        seeds=[chain_head(scheme)],
        tokens=[5],
        generations=[1],
        digests=[2],
        sums=[3],
        scheme=scheme,
        key=0,
    )
    assert records[0, 2].item() == oracle.signed(oracle.s(oracle.ANCHOR))

"""Compare: exactly the faults that are there, compacted, with the true count."""

from __future__ import annotations

import pytest
import torch
from canary_kernels import (
    COMPARE_FIELDS,
    STAMPED,
    Findings,
    KernelArgumentError,
    launch_compare,
)
from native_layouts import poisoned


def empty(width, capacity, device="cpu"):
    findings = Findings(rows=poisoned(capacity, width, device=device), count=poisoned(1, device=device))
    findings.reset()
    return findings


def listed(findings):
    count = int(findings.count)
    return sorted(findings.rows[: min(count, findings.rows.shape[0])].tolist()), count


def vector(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int64, device=device)


def compare(backend, records, slots, digests, sums, *, capacity=100, base=0):
    device = records.device
    out = empty(COMPARE_FIELDS, capacity, device)
    launch_compare(
        records=records,
        slots=vector(slots, device),
        digests=vector(digests, device),
        sums=vector(sums, device),
        out=out,
        item_base=base,
        backend=backend,
    )
    return listed(out)


def stamped_records(count, device="cpu"):
    records = torch.zeros((count, 8), dtype=torch.int64)
    records[:, 3] = torch.arange(count) * 10
    records[:, 4] = torch.arange(count) * 7
    records[:, 6] = STAMPED
    return records.to(device)


def test_compare_lists_each_mismatch(backend, device, ran):
    records = stamped_records(600, device)
    records[5, 6] = 0
    slots = [599 - item for item in range(600)] + [-1, 600, (1 << 63) - 1]
    digests = [slot * 10 for slot in slots[:600]] + [0, 0, 0]
    sums = [slot * 7 for slot in slots[:600]] + [0, 0, 0]
    digests[17] += 1
    sums[300] -= 1
    rows, count = compare(backend, records, slots, digests, sums, base=1000)
    assert count == 6
    assert rows == [
        [1017, 5820, 5821, 4074, 4074],
        [1300, 2990, 2990, 2093, 2092],
        [1594, 50, 50, 35, 35],  # slot 5 was never stamped
        [1600, 0, 0, 0, 0],
        [1601, 0, 0, 0, 0],
        [1602, 0, 0, 0, 0],
    ]
    assert (ran["compare_kernel"] > 0) == (backend == "triton")


def test_compare_counts_beyond_its_capacity(backend, device):
    records = stamped_records(600, device)
    wrong = [slot * 10 + 1 for slot in range(600)]
    rows, count = compare(backend, records, list(range(600)), wrong, [slot * 7 for slot in range(600)], capacity=3)
    assert count == 600
    assert len(rows) == 3
    assert all(row[1] + 1 == row[2] == row[0] * 10 + 1 for row in rows)


def test_findings_append_to_what_is_there(backend):
    records = stamped_records(4)
    out = empty(COMPARE_FIELDS, 3)
    for base in (0, 50):
        launch_compare(
            records=records,
            slots=vector([0, 1]),
            digests=vector([1, 11]),
            sums=vector([0, 7]),
            out=out,
            item_base=base,
            backend=backend,
        )
    rows, count = listed(out)
    assert count == 4
    assert [row[0] for row in rows] == [0, 1, 50]


def test_bad_findings_are_refused(backend):
    records = stamped_records(2)
    one = vector([0])
    with pytest.raises(KernelArgumentError, match=r"rows must have 5 columns, got shape \(7, 2\)"):
        launch_compare(records=records, slots=one, digests=one, sums=one, out=empty(2, 7), backend=backend)

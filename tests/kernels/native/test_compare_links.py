"""Compare and links: exactly the faults that are there, compacted, with the true count."""

from __future__ import annotations

import canary_kernels.reference.items as items_reference
import canary_kernels.reference.links as links_reference
import native_oracle as oracle
import pytest
import torch
from canary_kernels import (
    CHAIN_UNKNOWN,
    COMPARE_FIELDS,
    LINK_FIELDS,
    STAMPED,
    Findings,
    Items,
    KernelArgumentError,
    launch_compare,
    launch_links,
)
from native_layouts import poisoned

from canaryd.watch import burst

SECRET = 0x1234_5678_9ABC_DEF0
CHAIN, POSITION, TOKEN, RANGE = burst.FAIL_CHAIN, burst.FAIL_POSITION, burst.FAIL_TOKEN, burst.FAIL_RANGE


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


class Row:
    """A row of eight slots, stamped as one run from position 3 on; tests damage it."""

    def __init__(self, scheme, device):
        self.scheme, self.device = scheme, device
        self.slots = [9, 4, 7, 0, 2, 11, 5, 6]
        self.tokens = [21, 22, 23, 24, 25, 26, 27, 28]
        self.positions = list(range(3, 11))
        self.prev = burst.NO_PREVIOUS
        self.head = 77
        self.run = 0
        self.records = torch.zeros((12, 8), dtype=torch.int64)
        steps = oracle.chain(scheme, self.head, self.tokens, self.positions, SECRET)
        for slot, token, position, (before, _) in zip(self.slots, self.tokens, self.positions, steps, strict=True):
            self.records[slot] = torch.tensor([token, position, before, 0, 0, 0, STAMPED, 0])

    def check(self, backend):
        slots = vector(self.slots, self.device)
        previous = [self.prev, *self.slots[:-1]]
        out = empty(LINK_FIELDS, 50, self.device)
        launch_links(
            records=self.records.to(self.device),
            items=Items(
                slots=slots,
                positions=vector(self.positions, self.device),
                prev_slots=vector(previous, self.device),
                run_numbers=torch.full_like(slots, self.run),
            ),
            tokens=vector(self.tokens, self.device),
            heads=vector([self.head], self.device),
            out=out,
            scheme=self.scheme,
            key=SECRET,
            backend=backend,
        )
        rows, count = listed(out)
        assert count == len(rows)
        return rows


def test_the_marks_are_the_bursts():
    assert links_reference.NO_PREVIOUS == burst.NO_PREVIOUS
    assert items_reference.UNCHECKED_PREVIOUS == burst.UNCHECKED_PREVIOUS
    names = ("FAIL_CHAIN", "FAIL_POSITION", "FAIL_TOKEN", "FAIL_RANGE")
    assert [getattr(links_reference, name) for name in names] == [getattr(burst, name) for name in names]


def test_a_clean_row_has_no_finding(scheme, backend, device, ran):
    assert Row(scheme, device).check(backend) == []
    assert (ran["links_kernel"] > 0) == (backend == "triton")


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda row: row.tokens.__setitem__(2, 99), [[2, TOKEN]]),
        (lambda row: row.tokens.__setitem__(2, -1), []),
        (lambda row: row.positions.__setitem__(4, 99), [[4, POSITION]]),
        (lambda row: setattr(row, "head", 78), [[0, CHAIN]]),
        (lambda row: row.slots.__setitem__(3, 12), [[3, RANGE], [4, RANGE]]),
        (lambda row: row.slots.__setitem__(7, -1), [[7, RANGE]]),
        # another slot of the row in the middle: everything is wrong with it, and the next one does not follow it
        (
            lambda row: row.slots.__setitem__(3, 9),
            [[3, CHAIN | POSITION | TOKEN], [4, CHAIN]],
        ),
        # never stamped: not judged, and neither is the link of the next one
        (lambda row: row.records[0].zero_(), []),
        (lambda row: row.records[0].__setitem__(0, 99), [[3, TOKEN], [4, CHAIN]]),
        (lambda row: row.records[0].__setitem__(1, 99), [[3, POSITION], [4, CHAIN]]),
        (lambda row: row.records[0].__setitem__(2, 99), [[3, CHAIN], [4, CHAIN]]),
    ],
)
def test_each_fault_is_found_where_it_is(damage, wanted, scheme, backend, device):
    row = Row(scheme, device)
    damage(row)
    assert row.check(backend) == wanted


def test_an_adopted_slot_is_not_judged_by_token_or_chain(scheme, backend, device):
    """Its token was not known at the stamp, so whatever its chain says is no evidence, for it or for the next slot."""
    row = Row(scheme, device)
    row.records[7, 0] = -1
    row.records[7, 2] = 12345
    row.records[7, 6] = STAMPED | CHAIN_UNKNOWN
    assert row.check(backend) == []
    row.positions[2] = 6
    assert row.check(backend) == [[2, POSITION]]


def test_the_first_link_by_its_previous_slot(scheme, backend, device):
    row = Row(scheme, device)
    row.slots, row.tokens, row.positions = row.slots[1:], row.tokens[1:], row.positions[1:]
    row.prev = 9
    assert row.check(backend) == []
    row.prev = 2
    assert row.check(backend) == [[0, CHAIN]]
    row.prev = burst.UNCHECKED_PREVIOUS
    assert row.check(backend) == []
    row.prev = burst.NO_PREVIOUS
    assert row.check(backend) == [[0, CHAIN]]
    row.prev = 12
    assert row.check(backend) == [[0, RANGE]]


@pytest.mark.parametrize("number", [-1, 1, 1 << 40])
def test_a_run_without_a_head_is_out_of_range(number, scheme, backend, device):
    row = Row(scheme, device)
    row.run = number
    assert row.check(backend) == [[0, RANGE]]


def test_bad_findings_are_refused(backend):
    records = stamped_records(2)
    one = vector([0])
    with pytest.raises(KernelArgumentError, match=r"rows must have 5 columns, got shape \(7, 2\)"):
        launch_compare(records=records, slots=one, digests=one, sums=one, out=empty(2, 7), backend=backend)

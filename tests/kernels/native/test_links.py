"""Row links: exactly the faults that are there, whatever the runs look like."""

from __future__ import annotations

import canary_kernels.reference.items as items_reference
import canary_kernels.reference.links as links_reference
import native_oracle as oracle
import pytest
import torch
from canary_kernels import (
    CHAIN_UNKNOWN,
    LINK_FIELDS,
    STAMPED,
    Findings,
    ItemRuns,
    KernelArgumentError,
    allocate_records,
    launch_links,
)
from native_layouts import poisoned

from canaryd.watch import burst

SECRET = 0x1234_5678_9ABC_DEF0
CHAIN, POSITION, TOKEN, RANGE = burst.FAIL_CHAIN, burst.FAIL_POSITION, burst.FAIL_TOKEN, burst.FAIL_RANGE


def empty(capacity, device="cpu"):
    findings = Findings(rows=poisoned(capacity, LINK_FIELDS, device=device), count=poisoned(1, device=device))
    findings.reset()
    return findings


def listed(findings):
    count = int(findings.count)
    return sorted(findings.rows[: min(count, findings.rows.shape[0])].tolist()), count


def vector(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int64, device=device)


class Table:
    """Runs over a pool of pages, in plain lists."""

    def __init__(self, page_size, num_pages):
        self.page_size, self.num_pages = page_size, num_pages
        self.pages, self.page_offsets = [], [0]
        self.first_offsets, self.first_positions, self.prevs, self.heads = [], [], [], []
        self.item_offsets, self.tokens = [0], []

    def add(self, pages, tokens, *, first=0, position=0, prev=burst.NO_PREVIOUS, head=0):
        self.pages += pages
        self.page_offsets.append(len(self.pages))
        self.first_offsets.append(first)
        self.first_positions.append(position)
        self.prevs.append(prev)
        self.heads.append(oracle.signed(head))
        self.tokens += tokens
        self.item_offsets.append(len(self.tokens))

    def slots(self, run):
        """Slots of a run's items, None where out of range."""
        pages = self.pages[self.page_offsets[run] : self.page_offsets[run + 1]]
        slots = []
        for nth in range(self.item_offsets[run + 1] - self.item_offsets[run]):
            index, rest = divmod(self.first_offsets[run] + nth, self.page_size)
            good = 0 <= index < len(pages) and 0 <= pages[index] < self.num_pages
            slots.append(pages[index] * self.page_size + rest if good else None)
        return slots

    def runs(self, device):
        return ItemRuns(
            pages=vector(self.pages, device),
            page_offsets=vector(self.page_offsets, device),
            first_offsets=vector(self.first_offsets, device),
            item_offsets=vector(self.item_offsets, device),
            first_positions=vector(self.first_positions, device),
            first_prev_slots=vector(self.prevs, device),
        )

    def check(self, records, scheme, backend, device, *, capacity=50, base=0):
        out = empty(capacity, device)
        launch_links(
            records=records.to(device),
            runs=self.runs(device),
            tokens=vector(self.tokens, device),
            heads=vector(self.heads, device),
            out=out,
            page_size=self.page_size,
            scheme=scheme,
            key=SECRET,
            item_base=base,
            backend=backend,
        )
        return listed(out)

    def expected(self, records, scheme):
        """What `check` must find, from the definition."""
        rows = []
        records = records.tolist()
        for run, (given, head) in enumerate(zip(self.prevs, self.heads, strict=True)):
            previous = given
            for nth, slot in enumerate(self.slots(run)):
                item = self.item_offsets[run] + nth
                bits = self._bits(records, scheme, slot, previous, head, self.tokens[item], nth, run)
                if bits:
                    rows.append([item, bits])
                previous = burst.UNCHECKED_PREVIOUS if slot is None else slot
        return rows

    def _bits(self, records, scheme, slot, previous, head, wanted_token, nth, run):
        wild = previous >= len(records)
        bits = RANGE if slot is None or wild else 0
        if slot is None or records[slot][1] < 0:
            return bits
        token, position, prev_hash = records[slot][:3]
        bits |= POSITION if position != self.first_positions[run] + nth else 0
        if token < 0:
            return bits
        bits |= TOKEN if wanted_token not in (-1, token) else 0
        wanted = None
        if previous == burst.NO_PREVIOUS:
            wanted = head
        elif previous >= 0 and not wild and min(records[previous][:2]) >= 0:
            before_token, before_position, before_hash = records[previous][:3]
            (pair,) = oracle.chain(scheme, before_hash, [before_token], [before_position], SECRET)
            wanted = oracle.signed(pair[1])
        return bits | (CHAIN if wanted is not None and wanted != prev_hash else 0)

    def stamp(self, records, scheme, run):
        """Writes the records of a run's items, as a stamp would have done."""
        slots = self.slots(run)
        tokens = self.tokens[self.item_offsets[run] : self.item_offsets[run + 1]]
        positions = [self.first_positions[run] + nth for nth in range(len(slots))]
        steps = oracle.chain(scheme, self.heads[run], tokens, positions, SECRET)
        for slot, token, position, (before, _) in zip(slots, tokens, positions, steps, strict=True):
            if slot is not None:
                flags = STAMPED | (CHAIN_UNKNOWN if token < 0 else 0)
                records[slot] = vector([token, position, oracle.signed(before), 5, 6, 7, flags, 0])


class Row:
    """A row of eight slots, stamped as one run from position 3 on; tests damage it."""

    def __init__(self, scheme, device):
        self.scheme, self.device = scheme, device
        self.slots = [9, 4, 7, 0, 2, 11, 5, 6]
        self.tokens = [21, 22, 23, 24, 25, 26, 27, 28]
        self.position = 3
        self.prev = burst.NO_PREVIOUS
        self.head = 77
        self.records = allocate_records(12, torch.device("cpu"))
        self.table().stamp(self.records, scheme, 0)

    def table(self):
        table = Table(1, 12)
        table.add(self.slots, self.tokens, position=self.position, prev=self.prev, head=self.head)
        return table

    def check(self, backend):
        rows, count = self.table().check(self.records, self.scheme, backend, self.device)
        assert count == len(rows)
        assert rows == self.table().expected(self.records, self.scheme)
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
        (lambda row: row.records[2].__setitem__(1, 99), [[4, POSITION], [5, CHAIN]]),
        (lambda row: setattr(row, "position", 4), [[item, POSITION] for item in range(8)]),
        (lambda row: setattr(row, "head", 78), [[0, CHAIN]]),
        (lambda row: row.slots.__setitem__(3, 12), [[3, RANGE]]),
        (lambda row: row.slots.__setitem__(7, -1), [[7, RANGE]]),
        # another slot of the row in the middle: everything is wrong with it, and the next one does not follow it
        (
            lambda row: row.slots.__setitem__(3, 9),
            [[3, CHAIN | POSITION | TOKEN], [4, CHAIN]],
        ),
        # never stamped: not judged, and neither is the link of the next one
        (lambda row: row.records[0].copy_(allocate_records(1, torch.device("cpu"))[0]), []),
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
    assert row.check(backend) == []
    row.records[7, 1] = 6
    assert row.check(backend) == [[2, POSITION]]


def test_the_first_link_by_its_previous_slot(scheme, backend, device):
    row = Row(scheme, device)
    row.slots, row.tokens, row.position = row.slots[1:], row.tokens[1:], row.position + 1
    row.prev = 9
    assert row.check(backend) == []
    row.prev = 2
    assert row.check(backend) == [[0, CHAIN]]
    for unchecked in (burst.UNCHECKED_PREVIOUS, -3, -(1 << 63), 1):  # slot 1 was never stamped
        row.prev = unchecked
        assert row.check(backend) == []
    row.prev = burst.NO_PREVIOUS
    assert row.check(backend) == [[0, CHAIN]]
    for wild in (12, 1 << 40, (1 << 63) - 1):
        row.prev = wild
        assert row.check(backend) == [[0, RANGE]]


def draw_table(generator, *, page_size, num_pages, runs):
    """Random runs, some of them over pages that do not exist or beyond their list, some empty."""

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    table = Table(page_size, num_pages)
    for _ in range(runs):
        pages = [draw(0, num_pages) if draw(0, 20) else draw(-2, num_pages + 3) for _ in range(draw(0, 6))]
        room = len(pages) * page_size
        first = draw(0, room + 1) if draw(0, 20) else draw(-3, room + 3)
        length = draw(0, max(1, room - first + 1)) if draw(0, 20) else draw(0, 9)
        tokens = [draw(0, 1000) if draw(0, 10) else -1 for _ in range(length)]
        prev = draw(0, num_pages * page_size) if draw(0, 4) == 0 else draw(-2, 0)
        table.add(pages, tokens, first=first, position=draw(0, 100), prev=prev, head=draw(0, 1 << 40))
    return table


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("runs", [1, 7, 60])
def test_random_runs_are_judged_as_the_definition_says(page_size, runs, scheme, backend, device, generator):
    num_pages = runs * 3 + 2
    table = draw_table(generator, page_size=page_size, num_pages=num_pages, runs=runs)
    records = allocate_records(num_pages * page_size, torch.device("cpu"))
    for run in range(runs):
        table.stamp(records, scheme, run)
    for at in torch.randint(len(records), (runs,), generator=generator).tolist():
        records[at, at % 3] += 1
    wanted = table.expected(records, scheme)
    rows, count = table.check(records, scheme, backend, device, capacity=5000, base=7)
    assert count == len(wanted)
    assert rows == [[item + 7, bits] for item, bits in wanted]
    rows, count = table.check(records, scheme, backend, device, capacity=2)
    assert count == len(wanted)
    assert len(rows) == min(2, count)


def test_ten_thousand_runs(scheme, backend, device, generator):
    """As many rows as a daemon may have: no limit, and each judged as its own."""
    runs = 10_000
    lengths = torch.randint(0, 3, (runs,), generator=generator).tolist()
    table = Table(1, sum(lengths))
    page = 0
    for run, length in enumerate(lengths):
        table.add(list(range(page, page + length)), list(range(run, run + length)), position=run % 7, head=run)
        page += length
    records = allocate_records(page, torch.device("cpu"))
    for run in range(runs):
        table.stamp(records, scheme, run)
    assert table.check(records, scheme, backend, device) == ([], 0)
    last = next(run for run in reversed(range(runs)) if lengths[run])
    records[table.slots(last)[-1], 0] += 1
    assert table.check(records, scheme, backend, device) == ([[page - 1, TOKEN]], 1)


@pytest.mark.parametrize(
    ("run_count", "item_count", "judged"),
    [(2, 5, 2), (9, 99, 3), (3, 9, 3), (1, 3, 1), (0, 3, 0), (-1, 3, 0), (2, -1, 0)],
)
def test_counts_come_from_the_device(run_count, item_count, judged, scheme, device):
    """Three runs of three items, each last token wrong; poison lies behind them. Counts are clamped."""
    from canary_kernels.device.links import enqueue_links

    table = Table(1, 9)
    for run in range(3):
        table.add(list(range(run * 3, run * 3 + 3)), [1, 2, 3], head=run)
    records = allocate_records(9, torch.device("cpu"))
    for run in range(3):
        table.stamp(records, scheme, run)
    table.tokens[2] = table.tokens[4] = table.tokens[8] = 99
    out = empty(50, device)
    enqueue_links(
        records=records.to(device),
        runs=table.runs(device),
        run_count=vector([run_count], device),
        item_count=vector([item_count], device),
        tokens=vector(table.tokens, device),
        heads=vector(table.heads, device),
        out=out,
        page_size=1,
        scheme=scheme,
        key=SECRET,
    )
    assert listed(out) == ([[2, TOKEN], [4, TOKEN], [8, TOKEN]][:judged], judged)


def test_items_behind_the_runs_are_out_of_range(backend, device, scheme):
    table = Table(1, 3)
    table.add([0, 1], [4, 5])
    records = allocate_records(3, torch.device("cpu"))
    table.tokens.append(6)
    assert table.check(records, scheme, backend, device) == ([[2, RANGE]], 1)


def test_bad_arguments_are_refused(backend):
    table = Table(0, 3)
    table.add([0], [4])
    records = allocate_records(3, torch.device("cpu"))
    with pytest.raises(KernelArgumentError, match="page_size must be positive, got 0"):
        table.check(records, "native", backend, "cpu")
    table = Table(1, 3)
    table.tokens.append(6)
    with pytest.raises(KernelArgumentError, match="tokens length must be 0 without runs, got 1"):
        table.check(records, "native", backend, "cpu")
    table.add([0], [4])
    table.heads.append(7)
    with pytest.raises(KernelArgumentError, match="heads length must be 1, got 2"):
        table.check(records, "native", backend, "cpu")

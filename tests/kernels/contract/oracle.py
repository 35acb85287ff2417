"""The contract in plain Python integers: slow, obvious, and independent of torch and of the package's own mixing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MASK = (1 << 64) - 1
BAD = (1 << 63) - 1
LENGTH_MAX = (1 << 31) - 1
COUNTER_MAX = 1 << 30


def signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >= 1 << 63 else value


def s(value: int) -> int:
    x = value & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def mix3(a: int, b: int, c: int) -> int:
    return s(s(s(a) ^ (b & MASK)) ^ (c & MASK))


HEAD = s(0xC0FFEE1234567890)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of bytes; `read_bytes` is what is hashed."""

    rows: Sequence[bytes]
    page_size: int
    token_bytes: int
    read_bytes: int

    @property
    def num_slots(self) -> int:
        return len(self.rows) * self.page_size

    def fold(self, slot: int) -> int:
        start = slot % self.page_size * self.token_bytes
        data = self.rows[slot // self.page_size][start : start + self.read_bytes]
        acc = 0
        for word in range(0, len(data), 8):
            acc = s(acc ^ int.from_bytes(data[word : word + 8], "little"))
        return acc


def real_hash(sources: Sequence[Source], slot: int) -> int:
    total = 0
    for source in sources:
        total = s(total ^ source.fold(slot))
    return total


Record = tuple[int, int, int, int]
"""token, position, prev_hash, real_kv_hash; signed."""


def record_at(buffer: Sequence[bytes], slot: int) -> Record:
    fields = [signed(int.from_bytes(buffer[slot][8 * k : 8 * k + 8], "little")) for k in range(4)]
    return fields[0], fields[1], fields[2], fields[3]


def hash_after(record: Record) -> int:
    return mix3(record[2], record[0], record[1])


def slot_limit(buffer: Sequence[bytes], sources: Sequence[Source]) -> int:
    return min([len(buffer), *(source.num_slots for source in sources)])


# --- plan -----------------------------------------------------------------------------------------------------------


def clamp_length(value: int) -> int:
    return max(0, min(value, LENGTH_MAX))


def window_start(prefix: int, window: int) -> int:
    return max(0, prefix - window) if window > 0 else 0


def lookup(table: Sequence[Sequence[int]], width: int, row: int, position: int, mapping: Sequence[int] | None) -> int:
    if not 0 <= row < len(table) or not 0 <= position < width:
        return BAD
    raw = table[row][position]
    if mapping is None or raw < 0:
        return raw
    return mapping[raw] if raw < len(mapping) else BAD


@dataclass(kw_only=True)
class Offsets:
    verify: list[int]
    write: list[int]
    seeds: list[int]
    num_valid: int
    enable: int
    num_reqs: int


def plan_offsets(
    *,
    rows: Sequence[int],
    prefixes: Sequence[int],
    extends: Sequence[int],
    table: Sequence[Sequence[int]],
    width: int,
    mapping: Sequence[int] | None,
    window: int,
    capacity: int,
) -> Offsets:
    verify, write, seeds = [0], [0], []
    for row, prefix_raw, extend_raw in zip(rows, prefixes, extends, strict=True):
        prefix, extend = clamp_length(prefix_raw), clamp_length(extend_raw)
        active = row != 0
        verify.append(verify[-1] + (prefix - window_start(prefix, window) if active else 0))
        write.append(write[-1] + (extend if active else 0))
        seeded = active and prefix > 0 and extend > 0
        seeds.append(lookup(table, width, row, prefix - 1, mapping) if seeded else -1)
    total = verify[-1]
    return Offsets(
        verify=verify,
        write=write,
        seeds=seeds,
        num_valid=min(total, capacity),
        enable=int(total <= capacity),
        num_reqs=len(rows),
    )


def plan_entries(
    *,
    rows: Sequence[int],
    prefixes: Sequence[int],
    table: Sequence[Sequence[int]],
    width: int,
    mapping: Sequence[int] | None,
    window: int,
    capacity: int,
    tokens: Sequence[Sequence[int]] | None,
    tokens_width: int,
    valid_lens: Sequence[int] | None,
    offset: int,
) -> list[tuple[int, int, int, int]]:
    """(slot, expected token, position, predecessor) of each entry; empty if they do not fit."""
    lengths = [
        clamp_length(p) - window_start(clamp_length(p), window) if row != 0 else 0
        for row, p in zip(rows, prefixes, strict=True)
    ]
    if sum(lengths) > capacity:
        return []
    entries = []
    for r, row in enumerate(rows):
        if row == 0:
            continue
        prefix = clamp_length(prefixes[r])
        for position in range(window_start(prefix, window), prefix):
            token = -1
            column = position + offset
            if (
                tokens is not None
                and valid_lens is not None
                and 0 <= column < min(valid_lens[r], tokens_width)
                and 0 <= row < len(tokens)
            ):
                token = tokens[row][column]
            previous = lookup(table, width, row, position - 1, mapping) if position > 0 else -1
            entries.append((lookup(table, width, row, position, mapping), token, position, previous))
    return entries


# --- verify and write -----------------------------------------------------------------------------------------------

Row = tuple[int, int, int, int, int, int, int, int]


@dataclass(kw_only=True)
class Outcome:
    rows: list[Row]
    slots_run: int


def verify(
    *,
    buffer: Sequence[bytes],
    sources: Sequence[Source],
    kind: int,
    entries: Sequence[tuple[int, int, int, int]],
    num_valid: int,
    enable: int,
    check_tokens: bool,
) -> Outcome:
    """`entries`: (slot, expected token, expected position, predecessor)."""
    if not enable:
        return Outcome(rows=[], slots_run=0)
    active = entries[: max(0, min(num_valid, len(entries)))]
    limit = slot_limit(buffer, sources)
    rows: list[Row] = []
    for slot, expected_token, expected_position, previous in active:
        wanted = expected_token if check_tokens else -1
        if slot == 0:
            continue
        if not 0 <= slot < limit:
            rows.append((kind, slot, 0, 0, wanted, 0, 0, 64))
            continue
        token, position, chain, real = record_at(buffer, slot)
        bits = 0
        aux = chain
        if previous >= len(buffer):
            bits |= 64
        elif previous != 0:
            aux = signed(HEAD if previous < 0 else hash_after(record_at(buffer, previous)))
        if chain != aux:
            bits |= 1
        if position != expected_position:
            bits |= 2
        if real != signed(real_hash(sources, slot)):
            bits |= 4
        if wanted not in (-1, token):
            bits |= 32
        if bits:
            rows.append((kind, slot, position, token, wanted, chain, aux, bits))
    return Outcome(rows=rows, slots_run=len(active))


@dataclass(kw_only=True)
class Written(Outcome):
    records: dict[int, tuple[int, set[Record]]]
    """Per stored slot the token that wins and the records that it may have (several if requests share the token)."""


def write(
    *,
    buffer: Sequence[bytes],
    sources: Sequence[Source],
    kind: int,
    offsets: Sequence[int],
    seeds: Sequence[int],
    num_valid: int,
    tokens: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[int],
    expected: tuple[Sequence[int], Sequence[int]] | None,
    check_positions: bool,
) -> Written:
    limit = slot_limit(buffer, sources)
    rows: list[Row] = []
    records: dict[int, tuple[int, set[Record]]] = {}
    stored = 0
    for r in range(max(0, min(num_valid, len(seeds)))):
        start, end, seed = offsets[r], offsets[r + 1], seeds[r]
        if start < 0 or end < start or end > len(tokens):
            rows.append((kind, -1, 0, 0, -1, 0, 0, 64))
            continue
        running, last = HEAD, 0
        seeded = 0 <= seed < len(buffer)
        if seed >= len(buffer):
            rows.append((kind, seed, 0, 0, -1, signed(HEAD), 0, 64))
        if seeded:
            record = record_at(buffer, seed)
            running, last = hash_after(record), record[1]
        for i in range(start, end):
            slot, token, position = slots[i], tokens[i], positions[i]
            if slot < 0:
                continue
            if slot >= limit:
                rows.append((kind, slot, position, token, -1, signed(running), 0, 64))
                continue
            if expected is not None:
                bits = 8 * (token != expected[0][i]) | 16 * (position != expected[1][i])
                if bits:
                    rows.append((kind, slot, position, token, expected[0][i], signed(running), expected[1][i], bits))
            following = signed(last + 1)
            if check_positions and seeded and position != following:
                rows.append((kind, slot, position, token, token, signed(running), following, 16))
            new = (token, position, signed(running), signed(real_hash(sources, slot)))
            winner, choices = records.get(slot, (-1, set()))
            if i > winner:
                records[slot] = (i, {new})
            elif i == winner:
                choices.add(new)
            running, last = mix3(running, token, position), position
            stored += 1
    return Written(rows=rows, slots_run=stored, records=records)


def counter_after(current: int, added: int) -> int:
    return current if current >= COUNTER_MAX or not added else min(current + added, COUNTER_MAX)


# --- scatter --------------------------------------------------------------------------------------------------------


def scatter(
    *, tokens: Sequence[int], offsets: Sequence[int], rows: Sequence[int], pool: Sequence[Sequence[int]], width: int
) -> list[list[int]]:
    out = [list(row) for row in pool]
    for r, row in enumerate(rows):
        for column, token in enumerate(range(offsets[r], offsets[r + 1])):
            if 0 <= row < len(out) and column < width and 0 <= token < len(tokens):
                value = tokens[token] & 0xFFFFFFFF
                out[row][column] = value - (1 << 32) if value >= 1 << 31 else value
    return out

"""What the core costs the worker's thread: applying ends, planning and judging bursts, and resident memory.

Run: `python benchmarks/ledger_apply.py [--slots N] [--steps N]`. No pool and no kernels: bursts are answered as a clean
device would; rows have pages all over the pool. Prints the least, the median and the 99th percentile of each part in
microseconds of the thread's CPU time, which other processes on the cores hardly disturb.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import numpy as np

from canaryd.watch.burst import Burst, BurstResult, CompareMismatches, GroupResult, LinkMismatches
from canaryd.watch.policy import Policy
from canaryd.watch.watch import Watch
from canaryd.wire.messages import (
    Attach,
    Begin,
    End,
    GroupSpec,
    Identity,
    PageSet,
    RegionSpec,
    RowOpen,
    Snapshot,
    Writes,
)

PAGE = 16
SLOT_BYTES = 2048
BUDGET = 2 << 30
NONE = np.zeros(0, dtype=np.int64)
DECODER = msgspec.msgpack.Decoder(End)

Scheme = Literal["native", "sglang"]


class Engine:
    """An engine's stream into a watch, with a clock of its own.

    Args:
        slots: slots of the pool.
        scheme: fingerprint scheme.
    """

    def __init__(self, slots: int, scheme: Scheme) -> None:
        region = RegionSpec(
            name="kv", memory=0, offset=0, page_stride=PAGE * SLOT_BYTES, slot_stride=SLOT_BYTES, piece_bytes=SLOT_BYTES
        )
        attach = Attach(
            identity=Identity(engine="benchmark"),
            engine_kind="benchmark",
            engine_version="1",
            client_version="1",
            memories=[],
            groups=[GroupSpec(name="full", num_pages=slots // PAGE, page_size=PAGE, regions=[region])],
            frees=True,
        )
        policy = Policy(bytes_per_burst=BUDGET, max_link_items_per_burst=1 << 21, max_stamps_per_burst=1 << 20)
        self.page_of = np.random.default_rng(0).permutation(slots // PAGE)
        self.watch = Watch(attach, policy=policy, scheme=scheme, chain_key=1, slot_bytes=[SLOT_BYTES])
        self.now = 1.0
        self.sequence = 0
        self.op = 0
        self.send(Snapshot(open_ops=[], rows=[], cached=[]))

    def slots(self, places: np.ndarray) -> bytes:
        """The slots, as a column, of places in rows that lie one behind the other."""
        return column(self.page_of[places // PAGE] * PAGE + places % PAGE)

    def send(self, message: Begin | End | Snapshot) -> None:
        """The next message of the stream."""
        self.sequence += 1
        self.watch.apply(self.sequence, message, self.now)

    def step(self, end: End) -> float:
        """Begin and end of one op, as they come from the wire; seconds that applying both took."""
        self.op += 1
        begin = Begin(op=self.op)
        end = DECODER.decode(msgspec.msgpack.encode(end))
        self.sequence += 2
        started = time.thread_time()
        self.watch.apply(self.sequence - 1, begin, self.now)
        self.watch.apply(self.sequence, end, self.now)
        return time.thread_time() - started

    def burst(self) -> tuple[float, float]:
        """One tick; seconds of `next_burst` and of `on_burst_done`."""
        self.now += 0.1
        started = time.thread_time()
        burst = self.watch.next_burst(self.now)
        planned = time.thread_time() - started
        if burst is None:
            return planned, 0.0
        result = clean(burst)
        started = time.thread_time()
        self.watch.on_burst_done(result, self.sequence, self.now)
        return planned, time.thread_time() - started

    def settle(self) -> None:
        """Ticks until nothing waits for its stamp."""
        while self.watch.report(self.now).pending_stamps:
            self.burst()


def clean(burst: Burst) -> BurstResult:
    """What a device without faults answers."""
    compare = CompareMismatches(items=NONE, stored_digests=NONE, seen_digests=NONE, stored_sums=NONE, seen_sums=NONE)
    groups = tuple(
        GroupResult(
            group=work.group,
            compare=compare if work.compare else None,
            links=LinkMismatches(items=NONE, bits=NONE) if work.links else None,
        )
        for work in burst.works
    )
    return BurstResult(number=burst.number, groups=groups)


def column(values: np.ndarray | list[int]) -> bytes:
    """A wire column."""
    return np.asarray(values, dtype="<i8").tobytes()


def open_rows(engine: Engine, count: int, length: int, room: int, *, ids: bool = True) -> list[str]:
    """Rows that have `length` tokens, one page range of `room` tokens each."""
    names = [f"request-{number}" for number in range(count)]
    rng = np.random.default_rng(1)
    for first in range(0, count, 16):
        part = range(first, min(first + 16, count))
        tokens = {row: rng.integers(0, 100_000, size=length) for row in part}
        engine.op += 1
        engine.send(Begin(op=engine.op))
        engine.send(
            End(
                op=engine.op,
                opened=[
                    RowOpen(row=names[row], group=0, pages=b"", length=0, ids=column(tokens[row]) if ids else b"")
                    for row in part
                ],
                writes=[
                    Writes(
                        group=0,
                        rows=[names[row] for row in part],
                        counts=column([length] * len(part)),
                        positions=column(np.tile(np.arange(length), len(part))),
                        tokens=column(np.concatenate([tokens[row] for row in part])),
                        slots=engine.slots(np.concatenate([row * room + np.arange(length) for row in part])),
                    )
                ],
            )
        )
    engine.settle()
    return names


def decode(count: int, steps: int, slots: int, scheme: Scheme) -> Iterator[tuple[str, list[float]]]:
    """Steps of one token for each of `count` rows, a burst after every tenth."""
    engine = Engine(slots, scheme)
    room = slots // count // PAGE * PAGE
    length = min(512, room // 2)
    names = open_rows(engine, count, length, room)
    rows = np.arange(count)
    rng = np.random.default_rng(2)
    costs = []
    for step in range(min(steps, room - length)):
        position = length + step
        writes = Writes(
            group=0,
            rows=list(names),
            counts=column(np.ones(count, dtype=np.int64)),
            positions=column(np.full(count, position)),
            tokens=column(rng.integers(0, 100_000, size=count)),
            slots=engine.slots(rows * room + position),
        )
        costs.append(engine.step(End(op=engine.op + 1, writes=[writes])))
        if step % 10 == 9:
            engine.burst()
    yield f"apply, decode step of {count} rows", costs


def prefill(
    tokens: int, rows: int, repeats: int, slots: int, scheme: Scheme, *, ids: bool
) -> Iterator[tuple[str, list[float]]]:
    """An end that opens `rows` rows and writes their prompts, `tokens` together; it closes and frees those before."""
    engine = Engine(slots, scheme)
    length = tokens // rows
    rng = np.random.default_rng(3)
    costs = []
    names: list[str] = []
    for turn in range(repeats):
        closed, names = names, [f"request-{turn}-{row}" for row in range(rows)]
        prompt = rng.integers(0, 100_000, size=(rows, length))
        base = turn % 4 * tokens
        place = np.arange(tokens) + base
        pages = engine.page_of[np.unique(place // PAGE)].reshape(rows, -1)
        end = End(
            op=engine.op + 1,
            closed=closed,
            opened=[
                RowOpen(row=name, group=0, pages=column(own), length=0, ids=column(ids_) if ids else b"")
                for name, own, ids_ in zip(names, pages, prompt, strict=True)
            ],
            writes=[
                Writes(
                    group=0,
                    rows=list(names),
                    counts=column([length] * rows),
                    positions=column(np.tile(np.arange(length), rows)),
                    tokens=column(prompt.ravel()),
                    slots=engine.slots(place),
                )
            ],
            freed=[
                PageSet(
                    group=0, pages=column(engine.page_of[np.arange(tokens // PAGE) + (turn + 3) % 4 * tokens // PAGE])
                )
            ],
        )
        costs.append(engine.step(end))
        engine.burst()
        engine.burst()
    told = "ids told" if ids else "no ids"
    yield f"apply, prefill of {rows} x {length}, {told}", costs


def bursts(count: int, length: int, steps: int, slots: int, scheme: Scheme) -> Iterator[tuple[str, list[float]]]:
    """Bursts over `count` live rows of `length` positions that decode on, the rest of the pool idle and cached."""
    engine = Engine(slots, scheme)
    room = slots // count // PAGE * PAGE
    length = min(length, room - steps - PAGE)
    names = open_rows(engine, count, length, room)
    rows = np.arange(count)
    planning, judging = [], []
    for step in range(steps):
        writes = Writes(
            group=0,
            rows=list(names),
            counts=column(np.ones(count, dtype=np.int64)),
            positions=column(np.full(count, length + step)),
            tokens=column(rows),
            slots=engine.slots(rows * room + length + step),
        )
        engine.step(End(op=engine.op + 1, writes=[writes]))
        planned, judged = engine.burst()
        planning.append(planned)
        judging.append(judged)
    of = f"{count} x {length} of {slots} slots"
    yield f"next_burst, {of}", planning
    yield f"on_burst_done, {of}", judging


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def memory(slots: int) -> float:
    """Resident bytes per slot of a watch whose slots have all been written."""
    before = resident()
    engine = Engine(slots, "native")
    open_rows(engine, slots // 4096, 4096, 4096)
    return (resident() - before) / slots


def say(title: str, costs: list[float]) -> None:
    """One line."""
    least, median, high = (float(np.quantile(costs, q)) * 1e6 for q in (0.0, 0.5, 0.99))
    sys.stdout.write(f"{title:<60} {least:>9.0f} {median:>9.0f} {high:>9.0f}\n")
    sys.stdout.flush()


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=1 << 20, help="slots of the pool (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="decode steps that are timed (default: %(default)s)")
    parser.add_argument("--scheme", choices=("native", "sglang"), default="native")
    parser.add_argument("--only", default="", help="parts whose name contains this: decode, prefill, bursts, memory")
    arguments = parser.parse_args()
    slots, steps, scheme = arguments.slots, arguments.steps, arguments.scheme
    parts: list[tuple[str, Callable[[], Iterator[tuple[str, list[float]]]]]] = [
        ("decode", lambda: decode(256, steps, slots, scheme)),
        ("decode", lambda: decode(1024, steps, slots, scheme)),
        ("prefill", lambda: prefill(16384, 1, steps // 10, slots, scheme, ids=True)),
        ("prefill", lambda: prefill(16384, 1, steps // 10, slots, scheme, ids=False)),
        ("prefill", lambda: prefill(16384, 16, steps // 10, slots, scheme, ids=True)),
        ("bursts", lambda: bursts(256, 4096, steps // 8, slots, scheme)),
        ("bursts", lambda: bursts(256, 512, steps // 8, slots, scheme)),
    ]
    sys.stdout.write(f"{'microseconds':<60} {'least':>9} {'p50':>9} {'p99':>9}\n")
    for name, part in parts:
        if arguments.only in name:
            for title, costs in part():
                say(title, costs)
    if arguments.only in "memory":
        sys.stdout.write(f"resident memory per slot: {memory(slots):.0f} bytes\n")


if __name__ == "__main__":
    main()

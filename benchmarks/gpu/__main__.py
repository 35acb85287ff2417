"""The GPU's benchmark, one command: proofs first, then the table. `--help` says how."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu import burst, cold, geometry, machine, neighbour, report
from benchmarks.gpu.check import mismatches
from benchmarks.gpu.compilation import recompilations, watched
from benchmarks.gpu.report import Report, RowResult
from benchmarks.gpu.rows import ARENA_BYTES, READ_BYTES, ROWS
from benchmarks.gpu.timing import Ceilings, Times, ceilings, timed, timed_pair
from benchmarks.gpu.workload import Place, Row, Workload

CHECK_ARENA_BYTES = 1 << 28
_COMPILERS = 12
_BURST = report.BURST
_MHA = geometry.rows(*[2048] * 64)

DESCRIPTION = """\
Checks every kernel bit for bit against its torch reference, and only then times it: GPU time by graph replay, in one
run with a read ceiling (XOR reduction of 8 GiB) and a device copy. Ends with 1 if a check fails (and then times
nothing), with 0 otherwise, whether goals were met or not.
"""
EPILOG = """\
examples:
  python -m benchmarks.gpu                       the whole table
  python -m benchmarks.gpu --only 'stamp|links'  rows whose name matches, no cold start, no neighbour
  python -m benchmarks.gpu --check               proofs only; with TRITON_INTERPRET=1 they run without a GPU
  python -m benchmarks.gpu --render run.json     keeps a run of another machine, writes the pages
  python -m benchmarks.gpu --save                also keeps the run in benchmarks/results/
"""


_BEGAN = time.perf_counter()


def say(text: str) -> None:
    """Progress with the seconds since the start, on stderr."""
    sys.stderr.write(f"{time.perf_counter() - _BEGAN:6.1f} s  {text}\n")
    sys.stderr.flush()


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="PATTERN", help="regular expression; only rows whose name matches")
    parser.add_argument("--list", action="store_true", help="names of the rows and their goals, and nothing else")
    parser.add_argument("--check", action="store_true", help="proofs only, no times")
    parser.add_argument("--json", metavar="FILE", type=Path, help="the whole report as JSON")
    parser.add_argument(
        "--render",
        metavar="FILE",
        type=Path,
        nargs="*",
        help="no measurement: keep these reports (of --json), and write the pages made from kept ones anew",
    )
    parser.add_argument("--save", action="store_true", help="keep the run in benchmarks/results/")
    return parser.parse_args(argv)


def check_all(rows: Iterable[Row], place: Place) -> list[str]:
    """Checks rows, on a GPU side by side, so that compilers run in parallel; what is wrong, in words."""
    on_gpu = place.device.type == "cuda"

    def check(row: Row) -> list[str]:
        sizes = row.check_sizes if on_gpu else row.check_sizes[:1]
        try:
            wrong = [str(found) for size in sizes for found in mismatches(row, place, size)]
        except Exception as error:  # noqa: BLE001 - a row that raises is red like one that differs, and is told
            wrong = [f"{row.name}: {type(error).__name__}: {error}"]
        say(f"  {'RED  ' if wrong else 'green'} {row.name}")
        return wrong

    with ThreadPoolExecutor(_COMPILERS if on_gpu else 1) as pool:
        return [line for wrong in pool.map(check, rows) for line in wrong]


def check_burst(place: Place) -> list[str]:
    """What is wrong with the burst, in words."""
    try:
        found = burst.burst_difference(place, layout=_MHA)
    except Exception as error:  # noqa: BLE001 - as for rows
        found = f"{type(error).__name__}: {error}"
    say(f"  {'RED  ' if found else 'green'} {_BURST}")
    return [f"{_BURST}: {found}"] if found else []


def row_result(row: Row, work: Workload, times: Times, base: Times | None, read: float) -> RowResult:
    """A line of the table; goals that compare with other rows are judged later."""
    floor = row.floor_us or work.bytes_moved / read * 1e6
    share = work.bytes_moved / times.p50 * 1e6 / read
    goal = row.goal
    met = [
        *([share >= goal.share] if goal.share is not None else []),
        *([times.p50 <= goal.micros] if goal.micros is not None else []),
        *([times.p50 <= base.p50 * (1 + goal.over_base)] if goal.over_base is not None and base is not None else []),
    ]
    return RowResult(
        name=row.name,
        p20=times.p20,
        p50=times.p50,
        p80=times.p80,
        bytes_moved=work.bytes_moved,
        bytes_per_second=work.bytes_moved / times.p50 * 1e6,
        share=share,
        floor_us=floor,
        goal=goal.text(),
        met=all(met) if met else None,
        beaten=row.beaten,
        note=f"digest alone {base.p50:,.1f} us, {times.p50 / base.p50 - 1:+.2%}" if base else "",
    )


def time_row(row: Row, place: Place, read: float) -> RowResult:
    """Builds a row at full size and times it."""
    work = row.build(place, row.size)
    base: Workload | None = getattr(work, "base", None)
    if base is None:
        return row_result(row, work, timed(_launcher(work), sets=work.sets), None, read)
    alone, together = timed_pair(_launcher(base), _launcher(work), sets=work.sets)
    return row_result(row, work, together, alone, read)


def _launcher(work: Workload) -> Callable[[int], None]:
    return lambda number: work.launch(number, "triton")


def judge_relations(rows: Sequence[Row], results: Sequence[RowResult]) -> None:
    """Judges the goals that compare one row with another."""
    p50 = {result.name: result.p50 for result in results}
    for row, result in zip(rows, results, strict=True):
        other = p50.get(row.goal.below or "")
        if other is not None:
            result.met = bool(result.met is not False and result.p50 < other)


def burst_result(place: Place, read: float) -> RowResult:
    """The line of the burst."""
    bench = burst.BurstBench(place, layout=_MHA, shape=burst.FULL, backend=None)
    times = bench.measure()
    bench.backend.close()
    whole = times.gpu.p50
    calls = f"{times.graph_launches} graph launches, {times.kernel_launches} other calls"
    return RowResult(
        name=_BURST,
        p20=times.gpu.p20,
        p50=whole,
        p80=times.gpu.p80,
        bytes_moved=times.bytes_read,
        bytes_per_second=times.bytes_read / whole * 1e6,
        share=times.bytes_read / whole * 1e6 / read,
        floor_us=burst.FLOOR_US,
        goal=f"<= {burst.GOAL_HOST_US:g} us of host time, one graph, no gap > {burst.GOAL_GAP_US:g} us",
        met=times.host.p50 <= burst.GOAL_HOST_US
        and times.graph_launches == 1
        and times.kernel_launches <= times.graph_launches
        and times.gap_us <= burst.GOAL_GAP_US,
        note=f"host {times.host.p50:.0f} us (p80 {times.host.p80:.0f}), {calls}, longest gap {times.gap_us:.1f} us",
    )


def chosen(pattern: str | None) -> list[Row]:
    """Rows whose name matches."""
    return [row for row in ROWS if pattern is None or re.search(pattern, row.name)]


def run(rows: list[Row], *, whole: bool, with_burst: bool) -> Report:
    """Times rows on the GPU, all of them proven."""
    began = time.perf_counter()
    place = Place.of("cuda", ARENA_BYTES)
    say("ceilings")
    found: Ceilings = ceilings(place.arena, read_bytes=READ_BYTES)
    say(f"  read {found.read / 1e12:.3f} TB/s, copy {found.copy / 1e12:.3f} TB/s")
    results: list[RowResult] = []
    with watched() as late:
        for row in rows:
            result = time_row(row, place, found.read)
            say(f"  {result.p50:10,.1f} us  {result.share:6.1%}  {row.name}  {result.note}")
            results.append(result)
            torch.cuda.empty_cache()
        judge_relations(rows, results)
    if with_burst:
        say("burst")
        results.append(burst_result(place, found.read))
        say(f"  {results[-1].p50:10,.1f} us  {results[-1].share:6.1%}  {results[-1].note}")
    again = [name for row in rows for name in recompilations(row, place)]
    say(f"recompilations by other sizes: {len(again)} {again or ''}; at full size: {late.kernels or 'none'}")
    compilation = {"recompilations": len(again) + len(late.kernels)} if whole else {}
    return Report(
        machine=machine.describe(),
        ceilings=asdict(found),
        rows=results,
        compilation=compilation,
        seconds=time.perf_counter() - began,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit status."""
    options = arguments(argv)
    if options.render is not None:
        keep(options.render)
        return 0
    return benchmark(options)


def benchmark(options: argparse.Namespace) -> int:
    """Checks and measures, or lists; the exit status."""
    rows = chosen(options.only)
    whole = options.only is None
    with_burst = whole or re.search(options.only, _BURST) is not None
    if options.list:
        for row in rows:
            sys.stdout.write(f"{row.name:60} {row.goal.text()}\n")
        return 0
    if not rows and not with_burst:
        say(f"no row matches {options.only!r}")
        return 2
    cuda = torch.cuda.is_available()
    if not cuda and not options.check:
        say("no CUDA device: only --check runs without one, with TRITON_INTERPRET=1")
        return 2
    began = time.perf_counter()
    started_cold = cold.measure() if whole and cuda and not options.check else {}
    say("checks, each row against the reference")
    place = Place.of("cuda" if cuda else "cpu", CHECK_ARENA_BYTES)
    with watched() as table:
        wrong = check_all(rows, place)
        if with_burst:
            wrong += check_burst(place)
    seconds = time.perf_counter() - began
    if wrong:
        sys.stdout.write("RED: no times are reported.\n" + "\n".join(wrong) + "\n")
        return 1
    say(f"all green; {len(table.kernels)} kernels compiled or loaded")
    if options.check:
        return 0
    del place
    outcome = run(rows, whole=whole, with_burst=with_burst)
    if whole:
        outcome.compilation |= started_cold | {"table_kernels": len(table.kernels), "table_seconds": seconds}
        say("neighbour")
        beside = neighbour.measure()
        outcome.neighbour = {**asdict(beside), "loss": beside.loss, "noise": beside.noise}
    outcome.seconds = time.perf_counter() - began
    finish(outcome, options)
    return 0


def keep(files: Sequence[Path]) -> None:
    """Keeps reports, and writes the pages."""
    for file in files:
        say(f"kept as {report.save(Report.from_json(file.read_text(encoding='utf-8')))}")
    report.render()


def finish(outcome: Report, options: argparse.Namespace) -> None:
    """Prints the table and writes what was asked for."""
    m = outcome.machine
    sys.stdout.write(
        f"{m['gpu']}, driver {m['driver']}, torch {m['torch']}, triton {m['triton']}, commit {m['commit'][:12]}\n"
        f"read ceiling {outcome.ceilings['read'] / 1e12:.3f} TB/s, copy {outcome.ceilings['copy'] / 1e12:.3f} TB/s\n\n"
    )
    sys.stdout.write(report.table(outcome.rows))
    sys.stdout.write("".join(f"\n{line}\n" for line in outcome.sentences()))
    sys.stdout.write(f"\n{len(outcome.missed)} goals missed; {outcome.seconds:.0f} s\n")
    if options.json is not None:
        options.json.write_text(outcome.to_json(), encoding="utf-8")
    if options.save:
        say(f"kept as {report.save(outcome)}")


if __name__ == "__main__":
    sys.exit(main())

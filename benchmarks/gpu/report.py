"""What a run found, as JSON, as a table for people, and as the page of kept results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results")
SCHEMA = 1

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
"""Around the figures in the repository's README."""
NO_RUN = "No run on a GPU is kept yet; `make bench-gpu ARGS=--save` keeps one."
BURST = "burst: stamps, links, second reads, 2 GiB"
FIGURES = (
    "digest + sum, 64 x 2 KiB",
    "digest + sum, 64 x 256 B",
    "digest + sum, MLA rows of 1,152 B",
    "digest + sum + bf16 NaN scan, 64 x 2 KiB",
    "compare, 64 x 2 KiB",
    "stamp a prefill, 4,096 x 8 KiB",
    "stamp a decode step, 256 x 64 x 2 KiB",
    "verify, 1,048,576 entries, no data, stride 32",
    "plan, 256 x 4,096",
    "row links, 1,048,576 live slots, pages of 16",
    "sglang verify, 1,048,576 entries, 2 KiB",
    "sglang write of a prefill, 4,096 x 8 KiB",
    BURST,
)
"""Rows that the repository's README shows."""

PAGE_HEAD = """\
# GPU results

Written by `make bench-gpu ARGS=--save`: the newest run of each GPU. GPU time by graph replay, p50 of the replays with
p20 and p80; bytes in whole 32-byte sectors; the ceilings are of the same run. [What the rows mean](../README.md).
"""


@dataclass(kw_only=True)
class RowResult:
    """One line. Times in microseconds; `share` of the read ceiling, 0 to 1; `met` None where there is no goal."""

    name: str
    p20: float
    p50: float
    p80: float
    bytes_moved: int
    bytes_per_second: float
    share: float
    floor_us: float
    goal: str
    met: bool | None
    beaten: float | None = None
    note: str = ""


@dataclass(kw_only=True)
class Report:
    """A whole run."""

    machine: dict[str, Any]
    ceilings: dict[str, Any]
    rows: list[RowResult]
    compilation: dict[str, Any] = field(default_factory=dict)
    neighbour: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        """Names of the rows that miss their goal."""
        return [row.name for row in self.rows if row.met is False]

    def to_json(self) -> str:
        """The run, to read back with `from_json`."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Raises ValueError for another schema."""
        data = json.loads(text)
        if data.pop("schema", None) != SCHEMA:
            raise ValueError(f"not a GPU report of schema {SCHEMA}")
        return cls(**{**data, "rows": [RowResult(**row) for row in data["rows"]]})

    def markdown(self) -> str:
        """The run as a section of the results page."""
        machine = self.machine
        lines = [
            f"## {machine['gpu']}, {machine['when'][:10]}",
            "",
            f"Driver {machine['driver']}, torch {machine['torch']}, triton {machine['triton']}, "
            f"commit {machine['commit'][:12]}. Read ceiling {self.ceilings['read'] / 1e12:.2f} TB/s, copy "
            f"{self.ceilings['copy'] / 1e12:.2f} TB/s (read + written). The run took {self.seconds:.0f} s.",
            "",
            "| work | p50 µs (p20, p80) | GB/s | of ceiling | floor µs | goal | met | SGLang µs |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *(_row(row) for row in self.rows),
            "",
            *(f"- {line}" for line in self.sentences()),
        ]
        return "\n".join(lines) + "\n"

    def sentences(self) -> list[str]:
        """Compilation and neighbour in words."""
        said = []
        if self.compilation:
            c = self.compilation
            said.append(
                f"Cold start, nothing cached: backend and first burst {c['cold_seconds']:.1f} s, of which the compiler "
                f"{c['cold_compiler_seconds']:.1f} s for {c['cold_kernels']} kernels; {c['table_kernels']} kernels for "
                f"all rows, {c['table_seconds']:.1f} s in parallel. Compilations by other sizes: {c['recompilations']}."
            )
        if self.neighbour:
            n = self.neighbour
            said.append(
                f"Bursts of {n['burst_bytes'] / 2**30:g} GiB every {n['period_ms']:g} ms beside a process that "
                f"re-reads 30 MiB in the L2: its steps take {n['beside']['mean_us']:.1f} µs in place of "
                f"{n['alone']['mean_us']:.1f} (p99 {n['beside']['p99_us']:.0f} in place of "
                f"{n['alone']['p99_us']:.0f}), a loss of {n['loss']:.2%}; two runs alone differ by {n['noise']:.2%}."
            )
        return said


def _row(row: RowResult) -> str:
    met = {True: "yes", False: "**no**", None: ""}[row.met]
    note = f" ({row.note})" if row.note else ""
    beaten = f"{row.beaten:,.0f}" if row.beaten else ""
    return (
        f"| {row.name}{note} | {row.p50:,.1f} ({row.p20:,.1f}, {row.p80:,.1f}) | {row.bytes_per_second / 1e9:,.0f} | "
        f"{row.share:.1%} | {row.floor_us:,.1f} | {row.goal.replace('<=', '≤').replace('>=', '≥')} | {met} | {beaten} |"
    )


def table(rows: list[RowResult]) -> str:
    """The rows for a terminal."""
    width = max(len(row.name) for row in rows)
    head = f"{'work':{width}}  {'p50 us':>10} {'p20':>10} {'p80':>10} {'GB/s':>6} {'share':>6} {'floor':>8}  goal"
    lines = [head, "-" * len(head)]
    for row in rows:
        met = {True: "met", False: "MISSED", None: ""}[row.met]
        times = f"{row.p50:10,.1f} {row.p20:10,.1f} {row.p80:10,.1f}"
        shares = f"{row.bytes_per_second / 1e9:6,.0f} {row.share:6.1%} {row.floor_us:8,.1f}"
        lines.append(f"{row.name:{width}}  {times} {shares}  {row.goal} {met} {row.note}".rstrip())
    return "\n".join(lines) + "\n"


def save(report: Report, root: Path = ROOT) -> Path:
    """Keeps the run as `<gpu>-<date>.json` and writes the pages anew; the JSON's path."""
    folder = root / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    name = report.machine["gpu"].lower().replace(" ", "-")
    path = folder / f"{name}-{report.machine['when'][:10]}.json"
    path.write_text(report.to_json(), encoding="utf-8")
    render(root)
    return path


def pages(root: Path = ROOT) -> dict[Path, str]:
    """What each page must hold, from the newest kept run of each GPU: the results' page, if there are results, and the
    repository's README with its figures.

    Raises:
        ValueError: the README has no place for the figures, or a file is not a report.
    """
    newest: dict[str, Report] = {}
    for path in sorted((root / RESULTS).glob("*.json")):
        report = Report.from_json(path.read_text(encoding="utf-8"))
        newest[report.machine["gpu"]] = report
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no lines {BEGIN} and {END}")
    figures = "\n".join(_figures(report) for report in newest.values()) or NO_RUN + "\n"
    made = {readme: f"{before}{BEGIN}\n{figures}{END}{after}"}
    if newest:
        sections = (PAGE_HEAD, *(report.markdown() for report in newest.values()))
        made[root / RESULTS / "README.md"] = "\n".join(sections)
    return made


def render(root: Path = ROOT) -> None:
    """Writes all pages that are made from kept runs."""
    for path, text in pages(root).items():
        path.write_text(text, encoding="utf-8")


def _figures(report: Report) -> str:
    machine, by_name = report.machine, {row.name: row for row in report.rows}
    shown = [by_name[name] for name in FIGURES if name in by_name]
    lines = [
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['torch']}, triton {machine['triton']}; read "
        f"ceiling {report.ceilings['read'] / 1e12:.2f} TB/s. [All rows]({RESULTS}/README.md).",
        "",
        "| kernel work | GPU time, p50 | GB/s | of the read ceiling | SGLang's kernels |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row.name} | {_micros(row.p50)} | {row.bytes_per_second / 1e9:,.0f} | {row.share:.1%} | "
            f"{_micros(row.beaten) if row.beaten else ''} |"
            for row in shown
        ),
    ]
    return "\n".join(lines) + "\n"


def _micros(micros: float) -> str:
    return f"{micros:,.1f} µs" if micros < 1000 else f"{micros / 1000:,.2f} ms"

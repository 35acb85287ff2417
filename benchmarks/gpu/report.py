"""What a run found, as JSON, as a table for people, and as the page of kept results."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
SCHEMA = 1

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


def save(report: Report, folder: Path = RESULTS) -> Path:
    """Keeps the run as `<gpu>-<date>.json` and writes the results page anew; the JSON's path."""
    folder.mkdir(exist_ok=True)
    name = report.machine["gpu"].lower().replace(" ", "-")
    path = folder / f"{name}-{report.machine['when'][:10]}.json"
    path.write_text(report.to_json(), encoding="utf-8")
    render(folder)
    return path


def render(folder: Path = RESULTS) -> Path:
    """Writes the results page from the newest kept run of each GPU; the page's path."""
    newest: dict[str, Report] = {}
    for path in sorted(folder.glob("*.json")):
        report = Report.from_json(path.read_text(encoding="utf-8"))
        newest[report.machine["gpu"]] = report
    page = folder / "README.md"
    page.write_text("\n".join((PAGE_HEAD, *(report.markdown() for report in newest.values()))), encoding="utf-8")
    return page

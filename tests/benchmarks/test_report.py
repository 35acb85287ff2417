"""Figures in the documents are those of kept runs, and what a run reports survives its JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import report
from benchmarks.gpu.report import BEGIN, BURST, END, FIGURES, NO_RUN, Report, RowResult, pages, render, save


def test_pages_are_in_step_with_the_kept_runs() -> None:
    """`python -m benchmarks.gpu --render` writes them anew."""
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, path


def a_report(*, gpu: str = "NVIDIA X", when: str = "2026-12-07T10:00:00+00:00", p50: float = 1234.5) -> Report:
    row = RowResult(
        name=FIGURES[0],
        p20=p50 - 1,
        p50=p50,
        p80=p50 + 1,
        bytes_moved=1 << 30,
        bytes_per_second=(1 << 30) / p50 * 1e6,
        share=0.961,
        floor_us=p50 * 0.96,
        goal=">= 95% of the ceiling",
        met=False,
        beaten=2456,
    )
    machine = {"gpu": gpu, "driver": "1.2", "torch": "2.11", "triton": "3.6", "commit": "0" * 40, "when": when}
    return Report(machine=machine, ceilings={"read": 4.6e12, "copy": 4.2e12}, rows=[row], seconds=99.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    return tmp_path


def test_without_runs_the_readme_says_so(root: Path) -> None:
    render(root)
    assert (root / "README.md").read_text() == f"above\n{BEGIN}\n{NO_RUN}\n{END}\nbelow\n"
    assert not (root / report.RESULTS).exists()


def test_the_newest_run_of_each_gpu_is_shown(root: Path) -> None:
    save(a_report(p50=7000, when="2026-12-06T10:00:00+00:00"), root)
    save(a_report(p50=1234.5), root)
    save(a_report(gpu="NVIDIA Y", p50=88.25), root)
    readme, page = (root / "README.md").read_text(), (root / report.RESULTS / "README.md").read_text()
    assert "| 1.23 ms | 870 | 96.1% | 2.46 ms |" in readme
    assert "| 88.2 µs |" in readme
    assert "7.00 ms" not in readme
    assert readme.startswith("above\n")
    assert readme.endswith("\nbelow\n")
    assert "1,234.5 (1,233.5, 1,235.5)" in page
    assert "≥ 95% of the ceiling | **no** |" in page
    assert {path: path.read_text() for path in pages(root)} == pages(root)


def test_a_report_survives_its_json_and_another_schema_is_refused() -> None:
    text = a_report().to_json()
    assert Report.from_json(text) == a_report()
    with pytest.raises(ValueError, match="schema"):
        Report.from_json(text.replace('"schema": 1', '"schema": 2'))


def test_a_readme_without_a_place_is_refused(root: Path) -> None:
    (root / "README.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="has no lines"):
        pages(root)


def test_every_figure_is_a_row() -> None:
    from benchmarks.gpu.rows import ROWS

    assert set(FIGURES) <= {BURST, *(row.name for row in ROWS)}

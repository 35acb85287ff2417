"""What the sanitizer's runner makes of its logs."""

from __future__ import annotations

import pytest

from tests.kernels.sanitize import outcome

PASSED = "..\n12 passed, 300 deselected in 20.1s\n"


@pytest.mark.parametrize(
    ("log", "status", "errors", "clean"),
    [
        (f"{PASSED}========= ERROR SUMMARY: 0 errors\n", 0, 0, True),
        (f"{PASSED}========= ERROR SUMMARY: 3 errors\n", 86, 3, False),
        (f"{PASSED}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, 0, True),
        (f"{PASSED}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 86, 1, False),
        ("1 failed in 2s\n========= ERROR SUMMARY: 0 errors\n", 1, 0, False),
        (PASSED, 0, None, False),
        (PASSED, None, None, False),
    ],
)
def test_only_a_summary_without_errors_is_clean(log: str, status: int | None, errors: int | None, clean: bool) -> None:
    found = outcome("memcheck", log, status, 20.0)
    assert (found.errors, found.clean) == (errors, clean)
    assert ("passed" in found.line()) == ("passed" in log)

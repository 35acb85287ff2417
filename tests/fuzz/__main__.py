"""Coverage-guided fuzzing: `python -m tests.fuzz TARGET [libFuzzer options] [corpus folders]`.

An input that raises is written to `crash-…` in the working folder; give it back as the only argument to replay it. What
it finds becomes a file in `tests/fuzz/crashes/TARGET/`, which the tests replay for ever.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["canaryd", "tests.fuzz", "yaml"]):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import TARGETS


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz {{{','.join(TARGETS)}}} [-runs=N] [-max_total_time=SECONDS] [CORPUS]")
    name = sys.argv.pop(1)
    with seeds(name) as folder:
        atheris.Setup([*sys.argv, str(folder)], TARGETS[name], enable_python_coverage=True)
        atheris.Fuzz()


main()

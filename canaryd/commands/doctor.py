"""`canaryd doctor`: what would keep canaryd from working here, and how to fix it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from canaryd import __version__
from canaryd.commands.text import paragraph
from canaryd.doctor.examine import Check, examine
from canaryd.doctor.probes import gather

_VERSION = 1
_EXIT = {"ok": 0, "skipped": 0, "warning": 1, "failed": 2}


def doctor(options: argparse.Namespace, load: Any) -> int:
    """Look, and print; status 0: fine, 1: warnings, 2: something fails."""
    config = load(options)
    checks = examine(gather(config, quick=options.quick), wants_gpus=config.workers.gpus != "off")
    if options.json:
        document = {"doctor_version": _VERSION, "canaryd": __version__, "checks": msgspec.to_builtins(checks)}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(render(checks)) + "\n")
    return max(_EXIT[each.state] for each in checks)


def render(checks: Sequence[Check]) -> list[str]:
    """Lines of at most 80 columns."""
    lines = []
    for each in checks:
        lines += paragraph(each.state, f"{each.name}: {each.said}")
        if each.fix and each.state != "ok":
            lines += paragraph("", f"fix: {each.fix}")
    return lines

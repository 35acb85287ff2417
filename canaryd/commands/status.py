"""`canaryd status` and `canaryd watch`: how things stand, worst first."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from canaryd.commands import daemon
from canaryd.commands.daemon import Unreachable
from canaryd.commands.text import WIDTH, ago, coloured, cut, device, duration, paragraph
from canaryd.config import Config
from canaryd.errors import ConfigError
from canaryd.status import statefile
from canaryd.status.problems import RUNBOOK

EXIT = {"ok": 0, "degraded": 1, "corrupt": 2}
UNREACHABLE = 3
_FINDINGS = 3
_RANKS = 6
_WORKERS = 2
_FINDING_LINE = "  {:15}  {:8}  {:11}  {:24}  {}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of both commands."""
    parser.add_argument("--url", help="the daemon's address (default: from the configuration)")
    parser.add_argument("-x", "--problems", action="store_true", help="print only what is wrong")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every counter and every finding")


def status(options: argparse.Namespace, load: Any) -> int:
    """Print once; the exit status."""
    document, failure = _document(options, load)
    if document is None:
        sys.stderr.write(f"canaryd: {failure}\n")
        return UNREACHABLE
    if options.json:
        answer = document if failure is None else {"unreachable": failure, **document}
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    else:
        lines = render(
            document, failure=failure, now=time.time(), only_problems=options.problems, verbose=options.verbose
        )
        sys.stdout.write("\n".join(lines) + "\n")
    return UNREACHABLE if failure else EXIT.get(document["overall"], 1)


def watch(options: argparse.Namespace, load: Any) -> int:
    """Print again and again until Ctrl-C; the exit status of the last look."""
    options.json = False
    code = 0
    try:
        while True:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[H\x1b[2J")
            code = status(options, load)
            sys.stdout.flush()
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return code


def _document(options: argparse.Namespace, load: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The daemon's document; or the one it left behind, and why it could not be asked."""
    settings: Config | None = None
    try:
        settings = None if options.url else load(options)
        return daemon.ask(options.url or daemon.address_of(load(options)), "/status"), None
    except ConfigError as error:
        # not status 2: for whoever reads the status that means corruption
        return None, f"configuration error, no daemon was asked:\n{error}"
    except Unreachable as error:
        return (None if settings is None else statefile.read(settings.state_dir)), str(error)


def render(
    document: dict[str, Any], *, failure: str | None, now: float, only_problems: bool = False, verbose: bool = False
) -> list[str]:
    """Lines of at most 80 columns."""
    lines = _head(document, failure, now)
    shown = document["problems"][:1] if not (only_problems or verbose) else document["problems"]
    if only_problems and not shown and failure is None:
        return ["canaryd: all is well"]
    for number, problem in enumerate(shown or [document]):
        lines += [""] * (number > 0)
        lines += paragraph("meaning", problem["meaning"]) + paragraph("action", problem["action"])
        if problem["see"]:
            lines += paragraph("see", problem["see"])
    others = len(document["problems"]) - len(shown)
    if others > 0:
        also = "; ".join(f"{each['code']} ({each['subject']})" for each in document["problems"][1:4])
        lines += paragraph("also", f"{also}{', ...' if others > 3 else ''}; canaryd status -x explains")
    troubled = {each["subject"] for each in document["problems"]}
    engines, workers = document["engines"], document["workers"]
    if only_problems:
        engines = [each for each in engines if f"{each['engine']} on {each['gpu_uuid']}" in troubled]
        workers = [each for each in workers if each["device"] in troubled]
    if len(engines) > 1 and not verbose:
        lines += [_short(each) for each in engines[:_RANKS]]
        lines += [f"  and {len(engines) - _RANKS} more: canaryd status -v"] * (len(engines) > _RANKS)
    else:
        lines += [line for each in engines for line in _engine(each, verbose)]
    if len(workers) > _WORKERS and not verbose:
        ready = sum(each["state"] == "ready" for each in workers)
        lines.append(f"workers: {ready} of {len(workers)} ready")
    else:
        lines += [line for each in workers for line in _worker(each, verbose)]
    if document["findings"]:
        lines += _findings(document, verbose)
    if verbose:
        lines += [
            f"daemon {document['version']}, configuration {document['config_source']}, "
            f"refused {_counts(document['attach_failures'])}, rejected {_counts(document['messages_rejected'])}"
        ]
    return [line.rstrip() for line in lines]


def _head(document: dict[str, Any], failure: str | None, now: float) -> list[str]:
    if failure is None:
        first = f"canaryd {document['version']}: {coloured(document['overall'])}"
        return [f"{first}, up {duration(document['uptime'])}"]
    how = "it was stopped" if not document["running"] else "it died or hangs"
    lines = [f"canaryd: {coloured('unreachable')}; nothing is watched now"]
    lines += paragraph("why", f"{failure}; {how}")
    lines += paragraph("action", "Start the daemon; its log says why it ended. Serving is not affected.")
    lines += paragraph("see", f"{RUNBOOK}canarydtargetdown")
    lines += paragraph(
        "last", f"what follows is {duration(max(0.0, now - document['time']))} old; it was {document['overall']} then"
    )
    return lines


def _short(engine: dict[str, Any]) -> str:
    """One of several ranks, on one line."""
    unguarded = "" if engine["unguarded_ratio"] is None else f", {engine['unguarded_ratio']:.0%} unguarded"
    return cut(
        f"engine {engine['engine']} on {device(engine['gpu_uuid'])}: {engine['state']}, "
        f"{engine['slots'].get('settled', 0)} settled{unguarded}, pass {ago(engine['pass_last_age'])}",
        WIDTH,
    )


def _engine(engine: dict[str, Any], verbose: bool) -> list[str]:
    slots = engine["slots"]
    lines = [
        cut(
            f"engine {engine['engine']} on {device(engine['gpu_uuid'])}: {engine['state']}, "
            f"heard {ago(engine['last_contact_age'])}, {engine['rows_open']} rows open",
            WIDTH,
        )
    ]
    if engine["state"] in ("refused", "gone"):
        return lines
    unguarded = engine["unguarded_ratio"]
    guarded = "nothing to guard" if not slots.get("settled") else f"{slots['settled']} slots settled"
    share = "" if unguarded is None or not slots.get("settled") else f"; {unguarded:.1%} of the content unguarded"
    lines.append(f"  guarded  {guarded}{share}")
    current = engine["pass_coverage_ratio"]
    now = "" if current is None else f"; this pass {min(1.0, current):.0%}"
    if engine["pass_last_age"] is None:
        lines.append(f"  pass     none complete yet{now}")
    else:
        took = "" if engine["pass_last_seconds"] is None else f", took {duration(engine['pass_last_seconds'])}"
        lines.append(f"  pass     {engine['pass_last_slots']} slots {ago(engine['pass_last_age'])}{took}{now}")
    lines.append(cut(f"  skipped  {_counts(engine['skipped'])}", WIDTH))
    if engine["busy_share"] is not None:
        of = "of one core" if engine["gpu_uuid"] == "host" else "of the GPU's time"
        lines.append(f"  cost     {engine['busy_share']:.2%} {of} since it was attached")
    if engine["process_visible"] is False:
        lines.append("  note     its process is in another PID namespace (see canaryd doctor)")
    if verbose:
        for label in ("mismatches", "suspects_dismissed", "reblessed", "slots"):
            lines += [cut(f"  {label.replace('_', ' ')}: {_counts(engine[label])}", WIDTH)]
        lines.append(
            f"  gaps {engine['message_gaps']}, stamps lost {engine['stamps_lost']}, ops open {engine['ops_open']}, "
            f"oldest look {ago(engine['oldest_unverified_age'])}"
        )
    return lines


def _worker(worker: dict[str, Any], verbose: bool) -> list[str]:
    tested = "no self-test yet" if worker["selftest_age"] is None else f"self-test passed {ago(worker['selftest_age'])}"
    lines = [f"worker {device(worker['device'])}: {worker['state']}, {tested}, {worker['restarts']} restarts"]
    if verbose:
        lines.append(f"  pid {worker['pid']}, {worker['resident_bytes'] / 1e6:.0f} MB, {worker['description']}")
        lines.append(cut(f"  launches {_counts(worker['launches'])}", WIDTH))
    return lines


def _findings(document: dict[str, Any], verbose: bool) -> list[str]:
    newest = sorted(document["findings"], key=lambda each: -each["last_seen"])
    shown = newest if verbose else newest[:_FINDINGS]
    lines = [f"findings: {document['findings_open']} open, newest first (canaryd findings show ID)"]
    for each in shown:
        detail = each["detail"]
        place = f"{detail.get('group', '?')} page {', '.join(map(str, detail.get('pages', ['?'])[:3]))}"
        times = each["count"] + each["joined"]
        lines.append(
            _FINDING_LINE.format(
                each["id"],
                each["check"],
                cut(str(detail.get("classification", "unknown")), 11),
                cut(place, 24),
                f"{times}x" if times > 1 else each["standing"].replace("unknown", ""),
            )
        )
    if len(shown) < document["findings_open"]:
        lines.append(f"  and {document['findings_open'] - len(shown)} more: canaryd findings list")
    return lines


def _counts(values: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in values.items()) or "none"

"""`canaryd findings`: list, show, acknowledge, export."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from canaryd.commands import daemon
from canaryd.commands.daemon import Unreachable
from canaryd.commands.text import cut, duration, moment, paragraph
from canaryd.config import Config
from canaryd.errors import CanarydError
from canaryd.findings import Finding
from canaryd.findings.acks import MAX_NOTE, Ack, peek, post
from canaryd.findings.export import bundle
from canaryd.findings.journal import acknowledged, read_findings
from canaryd.status import statefile

_VERSION = 1
_LINE = "{:16} {:9} {:11} {:20} {:>5} {:>7}  {}"


class NoSuchFinding(CanarydError):
    """The id is unknown, or not open."""

    reason = "no_such_finding"


class FilesUnreadable(CanarydError):
    """The files of `state_dir` cannot be read or written; the message says as whom to try."""

    reason = "files_unreadable"


def add_commands(parser: argparse.ArgumentParser, add_config: Any) -> None:
    """The sub-commands of `canaryd findings`."""
    commands = parser.add_subparsers(metavar="ACTION", required=True)
    listing = commands.add_parser("list", help="open findings, newest first")
    listing.add_argument("--all", action="store_true", help="those acknowledged and closed too")
    listing.set_defaults(act=_list)
    show = commands.add_parser("show", help="everything that is known of one finding")
    show.add_argument("id", metavar="ID")
    show.set_defaults(act=_show)
    ack = commands.add_parser(
        "ack",
        help="take findings off the list of open ones",
        description="Records who, when and why; works while the daemon is down. The gauge clears within a second.",
    )
    ack.add_argument("ids", metavar="ID", nargs="*")
    ack.add_argument("--all", action="store_true", help="every finding that is open now")
    ack.add_argument("--note", default="", help="what was done about it")
    ack.add_argument("--by", default="", help="who, if not the user who runs this")
    ack.set_defaults(act=_ack)
    export = commands.add_parser(
        "export",
        help="a bundle for a bug report: no token, KV byte, handle or request id",
        description="Prints JSON with the finding, the pool's shape, versions, status and GPU counters.",
    )
    export.add_argument("id", metavar="ID")
    export.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there instead of printing")
    export.set_defaults(act=_export)
    for each in (listing, show, ack):
        each.add_argument("--json", action="store_true", help="print JSON")
    for each in (listing, show, ack, export):
        add_config(each)


def findings(options: argparse.Namespace, load: Any) -> int:
    """Run one of them; the exit status."""
    return int(options.act(options, load(options)))


def _known(settings: Config) -> dict[str, Finding]:
    """Every finding that the files know, with what the running daemon knows better and what waits in the mailbox."""
    try:
        known = {each.id: each for each in read_findings(settings.state_dir, settings.findings.files)}
        waiting = peek(settings.state_dir)
    except OSError as error:
        raise FilesUnreadable(
            f"the findings in {settings.state_dir} cannot be read: {error.strerror}; run this as the daemon's user."
        ) from error
    for ack in waiting:
        if ack.id in known and known[ack.id].state == "open":
            known[ack.id] = acknowledged(known[ack.id], ack)
    try:
        for document in daemon.ask(daemon.address_of(settings), "/findings"):
            finding = known.get(document["id"])
            if finding is not None and finding.state == "open":
                known[finding.id] = msgspec.structs.replace(finding, readers=document["readers"])
    except Unreachable:
        return known  # the files say all but who reads the place now
    return known


def _one(settings: Config, identity: str) -> Finding:
    finding = _known(settings).get(identity)
    if finding is None:
        raise NoSuchFinding(f"no finding {identity!r} in {settings.state_dir}; see canaryd findings list --all")
    return finding


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


# --- list and show --------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace, settings: Config) -> int:
    chosen = [each for each in _known(settings).values() if options.all or each.state == "open"]
    chosen.sort(key=lambda each: -each.last_seen)
    if options.json:
        _print_json({"findings_version": _VERSION, "findings": msgspec.to_builtins(chosen)})
        return 0
    if not chosen:
        sys.stdout.write("no findings are known\n" if options.all else "no finding is open\n")
        return 0
    sys.stdout.write(_LINE.format("ID", "CHECK", "CLASS", "WHERE", "TIMES", "AGE", "STATE") + "\n")
    for each in chosen:
        sys.stdout.write(_line(each, time.time()) + "\n")
    return 0


def _line(finding: Finding, now: float) -> str:
    pages = finding.detail.get("pages") or []
    where = f"{finding.engine} page {pages[0] if pages else '?'}{'+' if len(pages) > 1 else ''}"
    age = duration(max(0.0, now - finding.last_seen)).replace(" ", "").replace("min", "m")
    state = (
        {"unknown": "open"}.get(finding.standing, finding.standing)
        if finding.state == "open"
        else {"acknowledged": "acked"}.get(finding.state, finding.state)
    )
    times = finding.count + finding.joined
    return _LINE.format(finding.id, finding.check, cut(finding.classification, 11), cut(where, 20), times, age, state)


def _show(options: argparse.Namespace, settings: Config) -> int:
    finding = _one(settings, options.id)
    if options.json:
        _print_json({"findings_version": _VERSION, "finding": msgspec.to_builtins(finding)})
    else:
        sys.stdout.write("\n".join(render(finding)) + "\n")
    return 0


def render(finding: Finding) -> list[str]:
    """Lines of at most 80 columns."""
    detail = finding.detail
    lines = [f"finding {finding.id}: {finding.check}, class {finding.classification}, {finding.state}"]
    lines += paragraph("engine", f"{finding.engine} on {finding.gpu_uuid}")
    where = f"group {detail.get('group', '?')}, pages {detail.get('pages', '?')}, slots {detail.get('slots', '?')}"
    if "region" in detail:
        where += f", region {detail['region']} from byte {detail['byte_offset']}, bits {detail['changed_bits']}"
    lines += paragraph("where", where)
    times = "once" if finding.count == 1 else f"{finding.count} times"
    lines += paragraph(
        "seen",
        f"{times}, first {moment(finding.opened)}, last {moment(finding.last_seen)}"
        + (f"; {finding.joined} more like it are counted here" if finding.joined else ""),
    )
    readers = "unknown" if finding.readers is None else str(finding.readers)
    standing = {"there": "the damage is still there", "overwritten": "overwritten since"}
    lines += paragraph(
        "now", f"{standing.get(finding.standing, 'not known')}; live requests that hold the page: {readers}"
    )
    if detail.get("row"):
        lines += paragraph("owner", f"row {detail['row']}, position {detail.get('position', '?')}")
    if detail.get("detail"):
        lines += paragraph("detail", str(detail["detail"]))
    lines += paragraph("verdict", f"{finding.verdict}. {finding.why}")
    if finding.hardware is not None:
        facts = msgspec.to_builtins(finding.hardware)
        del facts["time"]
        lines += paragraph("GPU", ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
    if finding.incident not in ("", finding.id):
        lines += paragraph("with", f"other ranks of the engine: incident {finding.incident}")
    if finding.state == "acknowledged":
        lines += paragraph("ack", f"by {finding.by}, {moment(finding.ended)}: {finding.note or 'no note'}")
    if finding.state == "closed":
        lines += paragraph("closed", f"{moment(finding.ended)}: {finding.cause}")
    kind = finding.classification if finding.check == "content" else ""
    lines += paragraph("see", f"docs/runbook.md#{f'class-{kind}' if kind else f'check-{finding.check}'}")
    return lines


# --- ack and export -------------------------------------------------------------------------------------------------


def _ack(options: argparse.Namespace, settings: Config) -> int:
    known = _known(settings)
    wanted = [each.id for each in known.values() if each.state == "open"] if options.all else options.ids
    if not wanted:
        raise NoSuchFinding("no finding is open" if options.all else "name an ID, or --all")
    for identity in wanted:
        if identity not in known or known[identity].state != "open":
            raise NoSuchFinding(f"no finding {identity!r} is open; nothing was acknowledged")
    if len(options.note) > MAX_NOTE:
        raise NoSuchFinding(f"a note has at most {MAX_NOTE} characters")
    by = options.by or os.environ.get("SUDO_USER") or getpass.getuser()
    acks = [Ack(id=identity, by=by, time=time.time(), note=options.note) for identity in wanted]
    try:
        post(settings.state_dir, acks)
    except OSError as error:
        raise FilesUnreadable(
            f"{settings.state_dir} cannot be written: {error.strerror}; run this as the daemon's user."
        ) from error
    if options.json:
        _print_json({"findings_version": _VERSION, "acknowledged": wanted, "by": by})
    else:
        sys.stdout.write(f"acknowledged {len(wanted)} by {by}: {', '.join(wanted)}\n")
    return 0


def _export(options: argparse.Namespace, settings: Config) -> int:
    finding = _one(settings, options.id)
    try:
        status = daemon.ask(daemon.address_of(settings), "/status")
    except Unreachable:
        status = statefile.read(settings.state_dir)
    text = json.dumps(bundle(finding, status, settings), indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {options.output}; read it before you publish it\n")
    return 0

"""The repository's rules about text, as tests. Each rule is a function from a file to its offences, tried on both an
offender and the whole tree."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".json", ".service", ""}
PYTHON_LINES_MAX = 500
TEST_LINES_MAX = 800  # tables of cases

# Spelled in two parts, so that this file does not break its own rules.
FORBIDDEN = (
    (re.compile(r"^\s*(import|from)\s+(c?pick" r"le|dill|cloudpick" r"le|marshal|shelve)\b", re.M), "unpickles data"),
    (re.compile(r"\btorch\.lo" r"ad\("), "unpickles data"),
    (re.compile(r"\b(recv|send)_pyo" r"bj\b"), "unpickles data"),
    (re.compile(r"\bexcept( Base)?( Exception)?: *pa" r"ss\b"), "swallows an error"),
)
UNANCHORED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b(?!.*#\d+)")
MACHINE = re.compile(
    r"(?<![\w.])/(wo"
    r"rk|ro"
    r"ot|ho"
    r"me/\w+)/[\w.]|\bpy"
    r"pi\.org\b|python"
    r"hosted|download\.pyt"
    r"orch"
    r"|\bdeb\.deb"
    r"ian\.org|/op"
    r"t/wheels"
)
VAGUE = re.compile(r"^(utils?|helpers?|common|misc|tools?)(\.py)?$")
DOCUMENT = re.compile(r"(?<![\w/.:-])([\w./-]*\w\.md)\b")
MAKE_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)\b(?=[`\s.,;:]|$)")

Rule = Callable[[Path, str], Iterator[str]]


@cache
def tracked_files() -> tuple[Path, ...]:
    """Every text file under version control, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = (Path(name) for name in listed.split("\0") if name)
    return tuple(path for path in files if path.suffix in TEXT and path.name != "LICENSE" and (ROOT / path).is_file())


def _lines(text: str, pattern: re.Pattern[str], why: str) -> Iterator[str]:
    for match in pattern.finditer(text):
        number = text.count("\n", 0, match.end()) + 1
        yield f"line {number}: {match.group().strip()!r} {why}"


def no_forbidden_words(path: Path, text: str) -> Iterator[str]:
    """Nothing is unpickled, nothing is swallowed."""
    if path.suffix == ".py":
        for pattern, why in FORBIDDEN:
            yield from _lines(text, pattern, why)


def open_ends_name_an_issue(path: Path, text: str) -> Iterator[str]:
    """An open end in the code names the issue that closes it: `# TO-DO(#12)`, without the dash."""
    if path.suffix != ".md":
        yield from _lines(text, UNANCHORED, "names no issue (#number)")


def no_machine_paths(path: Path, text: str) -> Iterator[str]:
    """No path of the machine that built this, and no package registry's host."""
    yield from _lines(text, MACHINE, "belongs to one machine or registry")


def no_vague_modules(path: Path, text: str) -> Iterator[str]:
    """A module is named after its subject."""
    yield from (f"{part!r} names no subject" for part in path.parts if VAGUE.match(part))


def python_files_are_short(path: Path, text: str) -> Iterator[str]:
    """At most 500 lines in a Python file; 800 in a test, which may hold a table of cases."""
    count = text.count("\n")
    limit = TEST_LINES_MAX if path.parts[0] == "tests" else PYTHON_LINES_MAX
    if path.suffix == ".py" and count > limit:
        yield f"{count} lines; split it (limit {limit})"


def named_documents_exist(path: Path, text: str) -> Iterator[str]:
    """A Markdown file that is mentioned is in the repository."""
    known = {file.name for file in tracked_files() if file.suffix == ".md"}
    for match in DOCUMENT.finditer(text):
        if Path(match.group(1)).name not in known:
            yield f"mentions {match.group(1)!r}, which is not in the repository"


def make_targets_exist(path: Path, text: str) -> Iterator[str]:
    """Every `make` command of the documents is a target of the Makefile."""
    if path.suffix != ".md":
        return
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.S))
    yield from (f"`make {name}` is no target" for name in MAKE_TARGET.findall(code) if name not in targets)


def links_lead_somewhere(path: Path, text: str) -> Iterator[str]:
    """A relative link of a document leads to a file, and its anchor to a heading there."""
    if path.suffix != ".md":
        return
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        file = (ROOT / path).parent / target if target else ROOT / path
        if not file.exists():
            yield f"link to {target!r}, which does not exist"
        elif anchor and anchor not in headings(file.read_text() if target else text):
            yield f"link to #{anchor}, which is no heading of {file.name}"


def headings(markdown: str) -> set[str]:
    """Anchors of a document's headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", markdown, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


OFFENDERS: list[tuple[Rule, str, str]] = [
    (no_forbidden_words, "a.py", "import pick" + "le\n"),
    (no_forbidden_words, "a.py", "x = torch.lo" + "ad(path)\n"),
    (no_forbidden_words, "a.py", "socket.recv_pyo" + "bj()\n"),
    (open_ends_name_an_issue, "a.py", "# TO" + "DO: later\n"),
    (no_machine_paths, "README.md", "see /wo" + "rk/main/x\n"),
    (no_machine_paths, "a.txt", "https://py" + "pi.org/simple\n"),
    (no_vague_modules, "canaryd/utils.py", ""),
    (no_vague_modules, "canaryd/helpers/x.py", ""),
    (python_files_are_short, "a.py", "x = 1\n" * (PYTHON_LINES_MAX + 1)),
    (python_files_are_short, "tests/a.py", "x = 1\n" * (TEST_LINES_MAX + 1)),
    (named_documents_exist, "a.py", "# see NOWHERE" + ".md for more\n"),
    (make_targets_exist, "README.md", "run `make coffee` first"),
    (links_lead_somewhere, "README.md", "[x](docs/nothing-here" + ".md)"),
    (links_lead_somewhere, "README.md", "# Title\n[x](#other)"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in OFFENDERS))


@pytest.mark.parametrize(("rule", "name", "text"), OFFENDERS)
def test_rule_sees_an_offender(rule: Rule, name: str, text: str) -> None:
    assert list(rule(Path(name), text))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps_the_rule(rule: Rule) -> None:
    offences = [
        f"{path}: {offence}"
        for path in tracked_files()
        for offence in rule(path, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not offences, f"{rule.__doc__}\n" + "\n".join(offences)


def test_tree_is_not_empty() -> None:
    assert len(tracked_files()) > 20

"""`canaryd demo`: starts the daemon and a real engine, injects faults, and says what was found."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from canaryd.demo.classes import classes_for
from canaryd.demo.conductor import ANSWER_SECONDS, Conductor
from canaryd.demo.daemon import DaemonPages, slots_in_file, wait_for_port
from canaryd.demo.display import LEGEND, Display, eviction_lines, table_lines
from canaryd.demo.processes import Child, ChildFailed
from canaryd.demo.scoring import Score

ENGINE_NAME = "demo"
MAX_AGE_LIVE = 1.0
MAX_AGE_IDLE = 2.0
MAX_ENGINE_LOSS = 0.05
"""Ten times the default: the demo's requests live for a second or two, and must be stamped well within."""
VERDICT_SECONDS = 4 * MAX_AGE_IDLE + 2.0
"""Within which a fault on a settled slot must be found: some promised ages, on a busy machine."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_INTERRUPTED = 130
_STAGES = ("evicted_s", "recomputed_s")
_LONGEST_PARENT = 50


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Status 0: every fault on a settled slot was found, every class had one, nothing was false."""
    options = _options(argv)
    signal.signal(signal.SIGTERM, _on_sigterm)
    folder = _folder()
    demo = Demo(options, folder)
    try:
        status = demo.run()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        status = _INTERRUPTED
    except (ChildFailed, OSError) as error:
        print(f"the demo failed: {error}", flush=True)
        status = 1
    finally:
        demo.stop()
    if status in (0, _INTERRUPTED):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        demo.show_logs()
    return status


def _folder() -> Path:
    """A new folder whose path leaves room for the name of a Unix socket."""
    parent = tempfile.gettempdir()
    if len(parent) > _LONGEST_PARENT:
        parent = "/tmp"  # noqa: S108 - mkdtemp makes a folder of our own in it
    return Path(tempfile.mkdtemp(prefix="canaryd-demo-", dir=parent))


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="canaryd demo",
        description="A real engine, the daemon beside it, faults injected from the engine's side of memory.",
        epilog=f"{LEGEND}\nStatus 0: every fault on a settled slot was detected, of each class at least one, and "
        "nothing else was raised. 1: not so, or something failed. 2: the options are wrong.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="of models, prompts and faults (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=35.0, help="seconds of injecting (default: %(default)s)")
    parser.add_argument("--scheme", choices=("native", "sglang"), default="native", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="async needs cuda")
    parser.add_argument("--model", choices=("llama", "sliding"), default="llama", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=0, help="the daemon's HTTP port (default: any free one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument(
        "--on-finding",
        choices=("report", "evict"),
        default="report",
        help="evict: damage shared prefixes only; the engine fails their readers, evicts and recomputes",
    )
    parser.add_argument("--no-faults", action="store_true", help="inject nothing: there must be no finding")
    parser.add_argument("--keep-serving", action="store_true", help="leave daemon and engine up until Ctrl-C")
    return parser


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """What can be known to fail is said before anything is started."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.mode == "async" and options.device != "cuda":
        parser.error("--mode async needs --device cuda")
    if options.on_finding == "evict" and options.model != "llama":
        parser.error("--on-finding evict needs --model llama: the other shares no prefixes")
    if options.duration <= 0:
        parser.error(f"--duration must be above 0, got {options.duration}")
    if not 0 <= options.port <= 65535:
        parser.error(f"--port must be between 0 and 65535, got {options.port}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.resolve().parent}")
    return options


class Demo:
    """One run. `stop` ends all that was started."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._state_dir = folder / "state"
        self._socket_dir = folder / "sockets"
        self._children: list[Child] = []
        self._score = Score([] if options.no_faults else classes_for(options.model, options.on_finding))
        self._evictions: dict[str, Any] = {}

    def run(self) -> int:
        """Start, inject, judge, report; the exit status."""
        options = self._options
        started = time.monotonic()
        with Display(self._score) as display:
            display.say(f"starting the daemon and the engine (seed {options.seed}, {options.device}, {options.mode})")
            engine, pages = self._start()
            self._wait_attached(pages, display)
            display.say(f"daemon: {pages.url}/metrics  {pages.url}/status")
            conductor = Conductor(
                engine,
                pages,
                self._score,
                display,
                verdict_seconds=VERDICT_SECONDS,
                rng=random.Random(options.seed),
                check=self._check,
            )
            if options.no_faults:
                conductor.watch(options.duration, "no faults")
            else:
                conductor.run(options.duration, max(20.0, options.duration / 2))
            conductor.watch(2 * MAX_AGE_IDLE, "looking for false alarms")
            if options.on_finding == "evict":
                engine.tell({"command": "evictions"})
                answer = engine.wait_for("evictions", ANSWER_SECONDS)
                self._evictions = {name: answer[name] for name in ("prefixes", "finished", "failed")}
        problems = self._problems(pages)
        report = self._report(pages, time.monotonic() - started)
        self._print(report, problems)
        if options.json:
            options.json.write_text(json.dumps(report, indent=2) + "\n")
        if options.keep_serving:
            self._serve_on(pages)
        return 1 if problems else 0

    def _start(self) -> tuple[Child, DaemonPages]:
        options = self._options
        for path in (self._state_dir, self._socket_dir):
            path.mkdir(mode=0o700)
        daemon = Child(
            "daemon",
            self._folder,
            "canaryd.cli",
            ["serve"],
            {
                "CANARYD_SOCKET_DIR": str(self._socket_dir),
                "CANARYD_STATE_DIR": str(self._state_dir),
                "CANARYD_SCHEME": options.scheme,
                "CANARYD_HTTP__HOST": "127.0.0.1",
                "CANARYD_HTTP__PORT": str(options.port),
                "CANARYD_WATCH__MAX_AGE_LIVE": str(MAX_AGE_LIVE),
                "CANARYD_WATCH__MAX_AGE_IDLE": str(MAX_AGE_IDLE),
                "CANARYD_WATCH__MAX_ENGINE_LOSS": str(MAX_ENGINE_LOSS),
                "CANARYD_WORKERS__HOST": "on" if options.device == "cpu" else "off",
                "CANARYD_WORKERS__GPUS": "off" if options.device == "cpu" else "auto",
            }
            | self._caches(),
        )
        self._children.append(daemon)
        pages = DaemonPages(wait_for_port(daemon, self._state_dir, 60))
        engine = Child(
            "engine",
            self._folder,
            "canaryd.demo.engine",
            [
                *("--socket-dir", str(self._socket_dir), "--daemon", pages.url, "--model", options.model),
                *("--on-finding", options.on_finding),
                *("--device", options.device, "--mode", options.mode, "--seed", str(options.seed)),
            ],
            _OFFLINE | {"OMP_NUM_THREADS": "1"} | self._caches(),
            talks=True,
        )
        self._children.append(engine)
        engine.wait_for("serving", 300)
        return engine, pages

    def _caches(self) -> dict[str, str]:
        """Where torch puts its compiler's cache: it goes with the folder."""
        return {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor")}

    def _check(self) -> None:
        for child in self._children:
            child.check()

    def _wait_attached(self, pages: DaemonPages, display: Display) -> None:
        """Until the daemon guards something of the engine. A GPU worker compiles its kernels first."""
        started = time.monotonic()
        while time.monotonic() - started < 300:
            self._check()
            engine = pages.engine(ENGINE_NAME)
            if engine is not None and engine["state"] == "attached" and engine["slots"].get("settled", 0) > 100:
                return
            display.update("waiting for the daemon to attach", time.monotonic() - started)
            time.sleep(0.2)
        raise ChildFailed("the daemon did not attach to the engine")

    def _problems(self, pages: DaemonPages) -> list[str]:
        problems = [
            f"false alarm: {each.check} in {each.group}, pages {sorted(each.pages)}, slots {list(each.ranges)}"
            for each in self._score.false_alarms
        ]
        for name, tally in self._score.tallies().items():
            if tally.missed:
                problems.append(f"{name}: {tally.missed} faults on settled slots were missed")
            if not tally.injected:
                problems.append(f"{name}: no fault hit a settled slot")
        for number, each in enumerate(self._evictions.get("prefixes", ()), 1):
            problems += [f"prefix {number} was not {name[:-2]}" for name in _STAGES if each[name] is None]
        if self._evictions:
            of_readers = sum(each["failed"] for each in self._evictions["prefixes"])
            if self._evictions["failed"] != of_readers:
                problems.append(f"{self._evictions['failed']} requests failed, of which {of_readers} were readers")
        counted = pages.counters("canaryd_mismatches_total", "check", engine=ENGINE_NAME)
        written = slots_in_file(self._state_dir)
        if counted != written:
            problems.append(f"the daemon counts {counted} mismatches and wrote findings of {written}")
        return problems

    def _report(self, pages: DaemonPages, seconds: float) -> dict[str, Any]:
        options = self._options
        tallies = self._score.tallies()
        engine = pages.engine(ENGINE_NAME) or {}
        return {
            "injected": sum(tally.injected for tally in tallies.values()),
            "unguarded": sum(tally.unguarded for tally in tallies.values()),
            "detected": sum(tally.detected for tally in tallies.values()),
            "missed": sum(tally.missed for tally in tallies.values()),
            "false_alarms": len(self._score.false_alarms),
            "classes": {name: tally.document() for name, tally in tallies.items()},
            "findings": self._score.findings,
            **({"evictions": self._evictions} if self._evictions else {}),
            "engine": f"transformers {engine.get('info', {}).get('version', '')}",
            "model": options.model,
            "mode": options.mode,
            "device": options.device,
            "scheme": options.scheme,
            "launches": pages.counters("canaryd_kernel_launches_total", "kernel"),
            "seed": options.seed,
            "duration": options.duration,
            "seconds": round(seconds, 1),
        }

    def _print(self, report: dict[str, Any], problems: list[str]) -> None:
        print()
        if self._options.no_faults:
            print(f"no faults were injected; findings: {report['findings']}")
        else:
            print("\n".join(table_lines(self._score)))
        if self._evictions:
            print("\n".join(eviction_lines(self._evictions)))
        launches = ", ".join(f"{kernel} {count}" for kernel, count in sorted(report["launches"].items()))
        print(f"{report['engine']} ({report['model']}, {report['mode']}) on {report['device']}, {report['scheme']}")
        print(f"launches: {launches}")
        print("\n".join(problems) if problems else "all is well")

    def _serve_on(self, pages: DaemonPages) -> None:
        print(f"serving on, Ctrl-C ends it: {pages.url}/metrics  {pages.url}/status  {pages.url}/findings", flush=True)
        try:
            while True:
                self._check()
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("stopping", flush=True)

    def stop(self) -> None:
        """End the engine, then the daemon."""
        while self._children:
            self._children.pop().stop()

    def show_logs(self) -> None:
        """The first error in each child's log and the log's end, and where it is."""
        for log in sorted(self._folder.glob("*.log")):
            print(f"--- {log}", flush=True)
            lines = log.read_text(errors="replace").splitlines()
            first = next((number for number, line in enumerate(lines) if line.startswith("Traceback")), len(lines))
            print("\n".join([*lines[:-25][first : first + 30], *lines[-25:]]), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""The command line: serve, status, watch, findings, doctor, config, selftest, demo."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from canaryd import __version__, config, logs
from canaryd.commands import doctor as doctor_command
from canaryd.commands import findings as findings_command
from canaryd.commands import status as status_command
from canaryd.errors import CanarydError, ConfigError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_EPILOG = """\
Start the daemon beside an engine:
  canaryd serve --config configs/canaryd.yaml
Any key can be set by an environment variable, two underscores for nesting:
  CANARYD_HTTP__PORT=9900 CANARYD_SOCKET_DIR=/tmp/canaryd canaryd serve
See it work, without an engine or a GPU of your own:
  canaryd demo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["demo"]:
        # The demo has options of its own, and needs packages that the daemon does not.
        from canaryd.demo.main import main as demo

        return int(demo(given[1:]))
    options = _parser().parse_args(given)
    try:
        return int(options.run(options))
    except ConfigError as error:
        sys.stderr.write(f"canaryd: configuration error:\n{error}\n")
        return EXIT_USAGE
    except CanarydError as error:
        sys.stderr.write(f"canaryd: {error}\n")
        return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="canaryd",
        description="KV-cache corruption detector that runs beside an LLM serving engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"canaryd {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser(
        "serve",
        help="run the daemon",
        description="Run the daemon until SIGTERM. Status 2: the configuration is wrong; 1: it cannot start.",
    )
    _add_config(serve)
    serve.set_defaults(run=_serve)

    status = commands.add_parser(
        "status",
        help="ask a running daemon how things stand",
        description="Status 0: ok, 1: degraded, 2: corruption stands, 3: no daemon answers or could be asked (then "
        "what it left in state_dir is shown, and how old that is).",
    )
    status_command.add_options(status)
    status.add_argument("--json", action="store_true", help="print the whole status document")
    _add_config(status)
    status.set_defaults(run=lambda options: status_command.status(options, _load))

    watch = commands.add_parser("watch", help="the same again and again, until Ctrl-C")
    status_command.add_options(watch)
    watch.add_argument("-n", "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="default: %(default)g")
    _add_config(watch)
    watch.set_defaults(run=lambda options: status_command.watch(options, _load))

    findings = commands.add_parser("findings", help="list, show, acknowledge or export findings")
    findings_command.add_commands(findings, _add_config)
    findings.set_defaults(run=lambda options: findings_command.findings(options, _load))

    doctor = commands.add_parser(
        "doctor",
        help="check this machine or container, and say how to fix it",
        description="GPUs and their UUIDs, CUDA IPC, compute mode, MPS, directories, PIDs, versions. Run it as the "
        "daemon's user. Status 0: fine, 1: warnings, 2: something fails.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--quick", action="store_true", help="share no GPU memory between two processes for a try")
    _add_config(doctor)
    doctor.set_defaults(run=lambda options: doctor_command.doctor(options, _load))

    show = commands.add_parser("config", help="print the configuration in force, with every key")
    _add_config(show)
    show.set_defaults(run=_config)

    selftest = commands.add_parser(
        "selftest", help="plant faults in a private buffer and prove that the kernels see them"
    )
    selftest.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    selftest.set_defaults(run=_selftest)

    commands.add_parser("demo", help="a real engine, injected faults, and what was found (see demo --help)")
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration (default: the built-in defaults)")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("seconds from 0.1 to 3600")
    return value


def _load(options: argparse.Namespace) -> config.Config:
    return config.load(options.config, os.environ)


def _serve(options: argparse.Namespace) -> int:
    from canaryd.serve import serve

    settings = _load(options)
    logs.configure(style=settings.logs.format, level=settings.logs.level)
    serve(settings, source=str(options.config or "defaults"))
    return EXIT_OK


def _config(options: argparse.Namespace) -> int:
    sys.stdout.write(config.dump(_load(options)))
    return EXIT_OK


def _selftest(options: argparse.Namespace) -> int:
    from canaryd.backend.selftest import run_and_print

    try:
        return EXIT_OK if run_and_print(options.device) else EXIT_FAILED
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        sys.stderr.write(f"canaryd: the device {options.device!r} cannot be used here: {str(error).splitlines()[0]}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())

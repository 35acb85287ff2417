"""The command line: serve, status, config, selftest, demo."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canaryd import __version__, config, logs
from canaryd.config import PORT_FILE
from canaryd.errors import CanarydError, ConfigError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
_STATUS_EXIT = {"ok": 0, "degraded": 1, "corrupt": 2}
_UNREACHABLE = 3

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
        description="Status 0: ok, 1: degraded, 2: corruption stands, 3: no daemon answers or could be asked.",
    )
    status.add_argument("--url", help="the daemon's address (default: from the configuration)")
    status.add_argument("--json", action="store_true", help="print the whole status document")
    _add_config(status)
    status.set_defaults(run=_status)

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


def _address(options: argparse.Namespace) -> str:
    if options.url:
        return str(options.url).rstrip("/")
    settings = _load(options)
    port = settings.http.port
    port_file = settings.state_dir / PORT_FILE
    if port == 0 and port_file.exists():
        port = int(port_file.read_text())
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.http.host, settings.http.host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _status(options: argparse.Namespace) -> int:
    try:
        address = _address(options)
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {address!r}")
    except ConfigError as error:
        # not status 2: for whoever reads the status that means corruption
        sys.stderr.write(f"canaryd: configuration error, no daemon was asked:\n{error}\n")
        return _UNREACHABLE
    try:
        with urllib.request.urlopen(f"{address}/status", timeout=5) as answer:  # noqa: S310 (http only, see above)
            document = json.load(answer)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"canaryd: no daemon answers at {address}: {error}\n")
        return _UNREACHABLE
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        _print_status(document)
    return _STATUS_EXIT.get(document["overall"], EXIT_FAILED)


def _print_status(document: dict[str, Any]) -> None:
    print(f"overall: {document['overall']}\nmeaning: {document['meaning']}\naction:  {document['action']}")
    for engine in document["engines"]:
        slots = engine["slots"]
        print(
            f"engine:  {engine['engine']} on {engine['gpu_uuid']}: {engine['state']}, "
            f"{slots.get('settled', 0)} slots settled, {engine['slots_verified']} comparisons, "
            f"mismatches: {sum(engine['mismatches'].values())}"
        )
        if engine["state"] == "refused":
            print(f"         {engine['refusal']}")
    for finding in document["findings"]:
        detail = finding["detail"]
        print(
            f"finding: {finding['id']} {finding['check']} in {finding['engine']}, group {detail.get('group')}, "
            f"pages {detail.get('pages')}, {detail.get('classification')}, {finding['age']:.0f} s ago"
        )


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

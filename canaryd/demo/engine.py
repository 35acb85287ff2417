"""The engine's process of the demo: serves random requests, and injects a fault when it is told to.

Commands come as JSON lines on standard input, answers go as JSON lines to standard output; at the end of the input
the process ends, so that it never outlives the demo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import threading
import time
from typing import Any

import torch

from canaryd.demo.bench import Bench, NoTarget, Recovery
from canaryd.demo.faults import FAULTS, STANDS, Injection
from canaryd.demo.models import PAGE_SIZE, VOCABULARY, batching_config, build_model, generation_config
from canaryd.engines.transformers import attach

ENGINE_NAME = "demo"

REQUESTS = 24
"""Requests at a time."""
EVICTION_SECONDS = 5.0
"""How long an engine that evicts may take from a finding to its next step."""
HEADS = 4
HEAD_TOKENS = 3 * PAGE_SIZE


class Traffic(threading.Thread):
    """Keeps a few dozen requests running, most of them behind a shared beginning."""

    def __init__(self, manager: Any, seed: int) -> None:
        super().__init__(name="traffic", daemon=True)
        self._manager = manager
        self._rng = random.Random(seed)
        self._heads = [self._tokens(HEAD_TOKENS) for _ in range(HEADS)]
        self.stopping = threading.Event()
        self.finished = 0
        self.failed = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCABULARY) for _ in range(count)]

    def run(self) -> None:
        """Add a request whenever one ends."""
        number = 0
        while not self.stopping.is_set():
            scheduler = self._manager.batch_processor.scheduler
            running = len(scheduler.active_requests) + len(scheduler.waiting_requests)
            for _ in range(REQUESTS - running - self._manager.input_queue.qsize()):
                head = self._rng.choice(self._heads) if self._rng.random() < 0.7 else []
                prompt = head + self._tokens(self._rng.randrange(2, 70))
                self._manager.add_request(
                    prompt, request_id=f"r{number}", max_new_tokens=self._rng.choice((20, 60, 150, 250))
                )
                number += 1
            result = self._manager.get_result(timeout=0.02)
            if result is not None and result.is_finished():
                self.failed += bool(result.error)
                self.finished += not result.error


class Injector:
    """Carries out commands; one thread."""

    def __init__(self, bench: Bench, traffic: Traffic) -> None:
        self._bench = bench
        self._traffic = traffic
        self._injections: dict[int, Injection] = {}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to one command."""
        number = int(command.get("id", 0))
        match command["command"]:
            case "inject":
                self._bench.prefer_settled = bool(command.get("prefer_settled"))
                return self._inject(number, str(command["class"]))
            case "look":
                return {"event": "looked", "id": number, "stands": self._stands(number)}
            case "clean":
                self._clean(number)
                return {"event": "cleaned", "id": number}
            case "evictions":
                prefixes = [each.document() for each in self._bench.recoveries]
                counts = {"finished": self._traffic.finished, "failed": self._traffic.failed}
                return {"event": "evictions", "prefixes": prefixes, **counts}
            case "forget":
                injection = self._injections.pop(number, None)
                if injection is not None:
                    self._bench.avoid -= injection.pages
                return {"event": "forgotten", "id": number}
        raise ValueError(f"unknown command {command['command']!r}")

    def _inject(self, number: int, name: str) -> dict[str, Any]:
        try:
            injection = FAULTS[name](self._bench)
        except NoTarget as reason:
            return {"event": "no_target", "id": number, "why": str(reason)}
        self._injections[number] = injection
        return {
            "event": "injected",
            "id": number,
            "group": injection.group.name,
            "pages": sorted(page for _, page in injection.pages),
            "slots": injection.slots,
            "requests": sorted(injection.requests),
            "settled": injection.settled,
            "at": injection.at,
        }

    def _stands(self, number: int) -> bool:
        """Whether it still stands: its settled witness not legally overwritten or freed, its table not mended."""
        injection = self._injections[number]
        fence = injection.fence
        if fence is not None and fence.gone and not fence.steps:
            return False  # its requests came to an end, and the table is whole again
        if not injection.witness:
            return True
        guards = [(self._bench.ask(injection.group, slot), generation) for slot, generation in injection.witness]
        return any(guard.state in STANDS and guard.generation == generation for guard, generation in guards)

    def _clean(self, number: int) -> None:
        injection = self._injections[number]
        if injection.recovery is not None:
            self._await_eviction(injection.recovery)
            return  # the engine has given up the pages, and others may hold them
        if injection.undo is not None:
            injection.undo()
        self._bench.retire(injection.pages, injection.requests)

    @staticmethod
    def _await_eviction(recovery: Recovery) -> None:
        deadline = time.monotonic() + EVICTION_SECONDS
        while recovery.evicted_s is None and time.monotonic() < deadline:
            time.sleep(0.01)


def main(arguments: list[str] | None = None) -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m canaryd.demo.engine")
    parser.add_argument("--socket-dir", required=True)
    parser.add_argument("--daemon", required=True)
    parser.add_argument("--model", choices=("llama", "sliding"), default="llama")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-finding", choices=("report", "evict"), default="report")
    parser.add_argument("--step-seconds", type=float, default=0.004)
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not break the answers
    torch.set_num_threads(1)

    model = build_model(options.model, seed=options.seed, device=options.device)
    manager = model.init_continuous_batching(
        generation_config=generation_config(max_new_tokens=100),
        continuous_batching_config=batching_config(
            use_async_batching=options.mode == "async", seed=options.seed, max_batch_tokens=512
        ),
    )
    attachment = attach(manager, socket_dir=options.socket_dir, name=ENGINE_NAME, on_finding=options.on_finding)
    manager.start()
    deadline = time.monotonic() + 60
    while manager.batch_processor is None and time.monotonic() < deadline:
        time.sleep(0.02)
    bench = Bench(
        manager, options.daemon, ENGINE_NAME, random.Random(options.seed + 1), step_seconds=options.step_seconds
    )
    bench.requests_evicted = lambda: attachment.eviction.requests if attachment.eviction is not None else 0
    traffic = Traffic(manager, options.seed + 2)
    traffic.start()
    print(json.dumps({"event": "serving", "device": str(model.device)}), file=answers)
    injector = Injector(bench, traffic)
    try:
        for line in sys.stdin:
            try:
                answer = injector.answer(json.loads(line))
            except Exception as error:
                logging.exception("a command failed")
                answer = {"event": "error", "why": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
    except KeyboardInterrupt:
        logging.info("interrupted")
    finally:
        traffic.stopping.set()
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"event": "stopped", "finished": traffic.finished}), file=answers)
        manager.stop(block=True, timeout=20, hard_stop=True)
        attachment.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

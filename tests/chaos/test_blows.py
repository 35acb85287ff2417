"""A real daemon and real engines under random blows: what is damaged afterwards is found, and nothing else is."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from daemon.harness import Daemon, EngineProcess, Folder, wait_for
from daemon.test_live import guarded

BLOWS = 6
TOKENS = 6
SCRAPES_PER_SECOND = 50

pytestmark = pytest.mark.slow


class Scraper(threading.Thread):
    """Scrapes `/metrics` all the time; an answer that does not come while the daemon should answer is a failure."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.port: int | None = None
        self.scrapes = 0
        self.failures: list[str] = []
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(1 / SCRAPES_PER_SECOND):
            port = self.port
            if port is None:
                continue
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    assert answer.read().endswith(b"\n")
                self.scrapes += 1
            except OSError as error:
                if self.port == port:
                    self.failures.append(repr(error))


class World:
    """One daemon, two engines, and what was damaged in each since it started."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.folder = Folder()
        self.scraper = Scraper()
        self.scraper.start()
        self.engines: dict[str, EngineProcess] = {}
        self.damaged: Counter[str] = Counter()
        self.rows = 0
        self.start_daemon()
        for name in ("a", "b"):
            self.start_engine(name)

    def start_daemon(self) -> None:
        self.daemon = Daemon(self.folder, WORKERS__HOST="on", WORKERS__HANG_TIMEOUT="2")
        self.scraper.port = self.daemon.port

    def start_engine(self, name: str) -> None:
        self.engines[name] = EngineProcess(self.folder, name, pages=128)
        self.damaged[name] = 0

    def damage_each(self) -> None:
        """A fault on a guarded slot of each engine: it is found, and so far nothing else ever was."""
        for name, engine in self.engines.items():
            self.rows += 1
            slots = engine.write(f"row-{self.rows}", TOKENS)
            wait_for(
                f"guarded slots of {name}",
                lambda engine=engine, slots=slots: all(guarded(self.daemon, engine, slot) for slot in slots),
                60,
            )
            engine.flip(self.rng.choice(slots), region=self.rng.randrange(2), bit=self.rng.randrange(8))
            self.damaged[name] += 1
        for name in self.engines:
            wait_for(f"the finding of {name}", lambda name=name: self.open_findings(name) >= self.damaged[name])
            assert self.open_findings(name) == self.damaged[name]

    def open_findings(self, name: str) -> float:
        return self.daemon.metric("canaryd_findings_open", engine=name) or 0.0

    # --- blows --------------------------------------------------------------------------------------------------------

    def kill_engine(self) -> None:
        name = self.rng.choice(sorted(self.engines))
        self.engines.pop(name).kill()
        self.start_engine(name)

    def stop_engine(self) -> None:
        self._stop(self.rng.choice(list(self.engines.values())).process.pid)

    def kill_worker(self) -> None:
        os.kill(self.daemon.worker()["pid"], signal.SIGKILL)

    def stop_worker(self) -> None:
        self._stop(self.daemon.worker()["pid"])

    def kill_supervisor(self) -> None:
        self.scraper.port = None
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.start_daemon()

    def stop_supervisor(self) -> None:
        self._stop(self.daemon.process.pid)

    def remove_sockets(self) -> None:
        """New engines cannot come; those that are there are watched on. A restart makes the folder anew."""
        shutil.rmtree(self.folder.sockets)
        self.damage_each()
        self.scraper.port = None
        self.daemon.stop()
        self.start_daemon()

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.1, 0.8))
        os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        self.scraper.port = None
        self.scraper.stop.set()
        self.scraper.join()
        for engine in self.engines.values():
            engine.kill()
        self.daemon.stop()
        self.folder.remove()


@pytest.fixture
def world(seed: int) -> Iterator[World]:
    made = World(random.Random(seed))
    yield made
    made.close()


def test_random_blows(world: World) -> None:
    world.damage_each()
    blows: list[Callable[[], None]] = [
        world.kill_engine,
        world.stop_engine,
        world.kill_worker,
        world.stop_worker,
        world.kill_supervisor,
        world.stop_supervisor,
        world.remove_sockets,
    ]
    for blow in world.rng.sample(blows, BLOWS):
        print(blow.__name__)
        for _ in range(world.rng.randrange(3)):  # under load
            world.rows += 1
            world.rng.choice(list(world.engines.values())).write(f"row-{world.rows}", TOKENS)
        blow()
        world.damage_each()
    assert not world.scraper.failures
    assert world.scraper.scrapes > 0

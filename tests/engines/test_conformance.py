"""The adapter's contract on a real engine: begin before a write, end behind it, name what was written.

Each test drives one mechanism of the engine and asserts that it really happened; the recorder checks every op.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from .conftest import Engine, prompts

Start = Callable[..., Engine]


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_serving_with_shared_prefixes(start: Start, kind: str) -> None:
    engine = start(kind)
    for seed in (1, 2):
        made = prompts(seed, 8, shared=40, longest=60)
        engine.manager.add_requests(made)
        engine.finish(len(made))
    seen = engine.recorder.seen
    assert seen["writes"] > 500
    assert seen["opened"] == 16 * len(engine.recorder.groups)
    if kind == "llama":
        assert seen["prefix_hits"] > 0
    else:
        assert seen["skips"] > 0, "no chunk was longer than the window"


def test_identical_prompts_are_deduplicated(start: Start) -> None:
    engine = start()
    made = [prompts(3, 2, shared=64, longest=5)[1]] * 3
    engine.manager.add_requests(made)
    engine.finish(len(made))
    assert engine.recorder.seen["exchanges"] > 0


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_forks_copy_and_share(start: Start, kind: str) -> None:
    engine = start(kind, sequences=3)
    made = prompts(4, 3, shared=37, longest=30)
    engine.manager.add_requests(made)
    engine.finish(3 * len(made))
    assert engine.recorder.seen["copies"] > 0


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_cancelled_requests_close(start: Start, kind: str) -> None:
    engine = start(kind, max_new_tokens=300)
    made = prompts(5, 6, shared=20, longest=30)
    ids = engine.manager.add_requests(made)
    time.sleep(0.3)
    for request_id in ids[:4]:
        engine.manager.cancel_request(request_id)
    time.sleep(0.3)
    for request_id in ids[4:]:
        engine.manager.cancel_request(request_id)
    deadline = time.monotonic() + 10
    while engine.recorder.groups[0].rows and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.recorder.seen["closed"] == 6
    assert engine.recorder.seen["freed"] > 0


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_cache_pressure_resets_requests(start: Start, kind: str) -> None:
    engine = start(kind, max_new_tokens=100, num_blocks=24)
    made = prompts(6, 10, shared=20, longest=60)
    engine.manager.add_requests(made)
    engine.finish(len(made))
    assert engine.recorder.seen["closed"] > 10, "no request was preempted"
    if kind == "sliding":
        assert engine.recorder.seen["voids"] > 0, "no sector changed hands"


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_offloaded_requests_are_restored(start: Start, unpinned: None, kind: str) -> None:
    engine = start(kind, max_new_tokens=100, num_blocks=24, cpu_offload_space=0.05)
    made = prompts(7, 10, shared=20, longest=60)
    engine.manager.add_requests(made)
    engine.finish(len(made))
    assert engine.recorder.seen["restored"] > 0

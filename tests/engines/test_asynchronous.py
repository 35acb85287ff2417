"""Asynchronous batching, where outputs of a step are handled after the next one was launched.

The engine wants a GPU for it. Its streams and events are replaced by ones that do everything at once, so the order of
the engine's own calls is the real one while the bytes can be compared after each op.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from .conftest import Engine, prompts


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_serving_forking_and_sharing(start_async: Callable[..., Engine], kind: str, sequences: int) -> None:
    engine = start_async(kind, sequences=sequences)
    for seed in (8, 9):
        made = prompts(seed, 6, shared=40, longest=60)
        engine.manager.add_requests(made)
        engine.finish(sequences * len(made))
    seen = engine.recorder.seen
    assert engine.manager.batch_processor.use_async_batching
    assert seen["writes"] > 300
    assert (seen["copies"] > 0) == (sequences > 1)


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize("offload", [0.0, 0.05])
def test_pressure(start_async: Callable[..., Engine], kind: str, offload: float) -> None:
    engine = start_async(kind, max_new_tokens=100, num_blocks=24, cpu_offload_space=offload)
    made = prompts(10, 10, shared=20, longest=60)
    engine.manager.add_requests(made)
    engine.finish(len(made))
    assert (engine.recorder.seen["restored"] > 0) == (offload > 0)


def test_the_last_step_ends_although_its_outputs_wait(start_async: Callable[..., Engine]) -> None:
    engine = start_async()
    engine.manager.add_requests(prompts(11, 3, shared=20, longest=30))
    engine.finish(3)
    time.sleep(0.3)
    # the idle loop begins and ends; nothing stays open for good
    assert len(engine.recorder.open_ops()) <= 1
    assert not engine.recorder.groups[0].rows

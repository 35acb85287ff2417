"""A real engine under a recording client."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from canaryd.demo.models import ModelKind, batching_config, build_model, generation_config
from canaryd.engines.transformers.attachment import Attachment, OnFinding

from .recorder import RecordingClient

PACKAGE = "transformers.generation.continuous_batching"


class Engine:
    """A manager with the adapter attached; `recorder` after the first step."""

    def __init__(self, manager: Any, on_finding: OnFinding = "report") -> None:
        self.manager = manager
        self.recorders: list[RecordingClient] = []
        self.attachment = Attachment(manager, self._connect, on_finding)

    def _connect(self, **description: Any) -> RecordingClient:
        recorder = RecordingClient(self.manager.batch_processor.cache, **description)
        self.recorders.append(recorder)
        return recorder

    @property
    def recorder(self) -> RecordingClient:
        return self.recorders[-1]

    def finish(self, count: int) -> list[Any]:
        """Results of `count` requests."""
        results = []
        while len(results) < count:
            result = self.manager.get_result(timeout=0.2)
            if result is not None and result.is_finished():
                results.append(result)
            assert self.manager.background_thread_status.fatal_error is None
        return results


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no pinned memory: what asks for it gets ordinary memory."""
    empty = torch.empty

    def ordinary(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs | {"pin_memory": False})

    monkeypatch.setattr(torch, "empty", ordinary)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Start an engine of a kind; it is stopped, and its recorder checked, at the end of the test."""
    engines: list[Engine] = []

    def starter(
        kind: ModelKind = "llama",
        *,
        max_new_tokens: int = 12,
        sequences: int = 1,
        on_finding: OnFinding = "report",
        **config: Any,
    ) -> Engine:
        model = build_model(kind, seed=5, window=24)
        manager = model.init_continuous_batching(
            generation_config=generation_config(
                max_new_tokens=max_new_tokens, sample=sequences > 1, sequences=sequences
            ),
            continuous_batching_config=batching_config(**({"num_blocks": 64, "seed": 7} | config)),
        )
        engine = Engine(manager, on_finding)
        engines.append(engine)
        manager.start()
        return engine

    yield starter
    for engine in engines:
        with contextlib.suppress(RuntimeError):
            engine.manager.stop(block=True)
        engine.attachment.close()
        for recorder in engine.recorders:
            assert recorder.violations == []


class InstantStream:
    def synchronize(self) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any) -> None: ...


class InstantEvent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


@pytest.fixture
def start_async(start: Callable[..., Engine], unpinned: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    import transformers.generation.continuous_batching.continuous_api  # noqa: F401 - patched below

    ios = sys.modules[f"{PACKAGE}.input_outputs"]
    monkeypatch.setattr(ios.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(ios, "create_device_stream", lambda _device: InstantStream())
    for module in ("input_outputs", "model_runner", "offloading_manager", "continuous_api"):
        monkeypatch.setattr(sys.modules[f"{PACKAGE}.{module}"], "stream_context", lambda _s: contextlib.nullcontext())
    monkeypatch.setattr(torch, "Event", InstantEvent)
    monkeypatch.setattr(torch.cuda, "Event", InstantEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    return lambda *args, **kwargs: start(*args, use_async_batching=True, **kwargs)


def prompts(seed: int, count: int, *, shared: int, longest: int) -> list[list[int]]:
    """Prompts of which most begin with the same `shared` tokens."""
    draw = random.Random(seed)
    head = [draw.randrange(1, 900) for _ in range(shared)]
    made = []
    for number in range(count):
        tail = [draw.randrange(1, 900) for _ in range(draw.randrange(1, longest))]
        made.append((head if number % 4 else []) + tail)
    return made

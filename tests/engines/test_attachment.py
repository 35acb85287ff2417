"""Coming and going: what attaches, what is left alone, and that the engine is as it was behind us."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from canaryd.client.memory import export_host_tensor
from canaryd.demo.models import batching_config, build_model, generation_config
from canaryd.engines.transformers import attach

from .conftest import Engine, prompts

Start = Callable[..., Engine]


def make_manager(**config: Any) -> Any:
    return build_model("llama", seed=5).init_continuous_batching(
        generation_config=generation_config(max_new_tokens=12),
        continuous_batching_config=batching_config(num_blocks=64, seed=7, **config),
    )


def test_views_of_the_engine_follow_the_shared_storage() -> None:
    manager = make_manager()
    manager.warmup()
    cache = manager.batch_processor.cache
    memory = export_host_tensor(cache.cache_tensor)
    try:
        first = cache.cache_tensor.data_ptr()
        views = [
            view for ca in cache.cache_allocators.values() for pair in ca._kv_token_views.values() for view in pair
        ]
        views += [ca._copy_view for ca in cache.cache_allocators.values()]
        assert cache.cache_tensor.is_shared()
        assert all(first <= view.data_ptr() < first + cache.cache_tensor.numel() for view in views)
        views[0].view(-1)[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert memory.fd is not None
        file = Path(f"/proc/self/fd/{memory.fd}").read_bytes()
        offset = views[0].data_ptr() - first
        assert torch.frombuffer(bytearray(file[offset : offset + 16]), dtype=torch.float32).tolist() == [1, 2, 3, 4]
    finally:
        memory.close()


def test_an_engine_that_serves_already_is_adopted(start: Start) -> None:
    manager = make_manager()
    manager.start()
    try:
        manager.add_requests(prompts(1, 4, shared=40, longest=30), max_new_tokens=150)
        time.sleep(0.3)
        engine = Engine(manager)
        engine.manager.add_requests(prompts(1, 4, shared=40, longest=20))
        engine.finish(8)
        deadline = time.monotonic() + 5
        while engine.recorder.groups[0].rows and time.monotonic() < deadline:
            time.sleep(0.02)
        engine.attachment.close()
        assert engine.recorder.violations == []
        assert engine.recorder.seen["opened"] == 4
        assert engine.recorder.seen["closed"] == 8
    finally:
        manager.stop(block=True)


def test_a_second_session_gets_a_client_of_its_own(start: Start) -> None:
    engine = start()
    for session in (1, 2):
        engine.manager.add_requests(prompts(session, 3, shared=20, longest=20))
        engine.finish(3)
        engine.manager.stop(block=True)
        assert len(engine.recorders) == session
        assert engine.recorder.closed
        # an op that never ends keeps the daemon from judging memory that is used for something else
        assert len(engine.recorder.open_ops()) == 1
        engine.manager.start()


def test_close_puts_the_methods_back(start: Start) -> None:
    engine = start()
    engine.manager.add_requests(prompts(2, 2, shared=20, longest=20))
    engine.finish(2)
    processor = engine.manager.batch_processor
    holders = [engine.manager, processor, processor.cache, processor.cache.pool, processor.model_runner]
    holders += [processor.offloading_manager, *processor.cache.cache_allocators.values()]
    engine.attachment.close()
    ours = [
        name
        for holder in holders
        for name, value in vars(holder).items()
        if callable(value) and "partial" in repr(value)
    ]
    assert ours == []
    engine.manager.add_requests(prompts(3, 2, shared=20, longest=20))
    engine.finish(2)


@pytest.mark.parametrize("version", ["5.17.2", "4.57.0", "unknown"])
def test_another_version_is_left_alone(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    manager = make_manager()
    attachment = attach(manager, socket_dir=tmp_path)
    assert "_create_batch_processor" not in vars(manager)
    assert attachment.client is None
    assert [record.levelno for record in caplog.records if record.name.startswith("canaryd")] == [logging.WARNING]


@pytest.mark.parametrize("engine", [object(), SimpleNamespace(prepare_next_batch=None), None])
def test_another_shape_is_left_alone(engine: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    attachment = attach(engine, socket_dir=tmp_path)
    assert attachment.client is None
    assert len([record for record in caplog.records if record.name.startswith("canaryd")]) == 1
    attachment.close()


def test_an_error_in_the_adapter_does_not_reach_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from canaryd.engines.transformers.rows import Rows

    def fail(*_args: Any) -> None:
        raise RuntimeError("planted")

    engine = start()
    engine.manager.add_requests(prompts(4, 2, shared=20, longest=20))
    engine.finish(2)
    monkeypatch.setattr(Rows, "collect", fail)
    engine.manager.add_requests(prompts(5, 2, shared=20, longest=20))
    engine.finish(2)
    assert engine.recorder.closed
    assert engine.recorder.open_ops(), "the op that was begun must not end as if its writes were named"


def test_attach_starts_no_thread_in_an_engine_that_does_not_run(tmp_path: Path) -> None:
    before = threading.active_count()
    attachment = attach(make_manager(), socket_dir=tmp_path)
    assert threading.active_count() == before
    attachment.close()

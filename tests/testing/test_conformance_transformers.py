"""The adapter of transformers under the conformance kit, on a real engine."""

from __future__ import annotations

from typing import Any

import pytest

from canaryd.demo.models import ModelKind, batching_config, build_model, generation_config
from canaryd.engines.transformers.attachment import Attachment
from canaryd.testing import ConformanceClient
from tests.engines.conftest import prompts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_the_transformers_adapter_conforms(kind: ModelKind) -> None:
    manager = build_model(kind, seed=5, window=24).init_continuous_batching(
        generation_config=generation_config(max_new_tokens=8, sample=False, sequences=1),
        continuous_batching_config=batching_config(num_blocks=64, seed=7),
    )
    clients: list[ConformanceClient] = []

    def connect(**description: Any) -> ConformanceClient:
        cache = manager.batch_processor.cache
        clients.append(
            ConformanceClient(
                read=lambda: [cache.cache_tensor.numpy()], frees=True, tiers="none", snapshot_every=3, **description
            )
        )
        return clients[-1]

    attachment = Attachment(manager, connect)
    manager.start()
    made = prompts(1, 8, shared=40, longest=60)
    manager.add_requests(made)
    finished = 0
    while finished < len(made):
        result = manager.get_result(timeout=0.2)
        finished += result is not None and result.is_finished()
        assert manager.background_thread_status.fatal_error is None
    manager.stop(block=True)
    attachment.close()
    (client,) = clients
    client.close()
    assert client.ops > 10
    assert client.violations == []

"""Faults of a step's inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from canaryd.demo.bench import Bench
from canaryd.demo.faults.injection import (
    Injection,
)
from canaryd.demo.models import VOCABULARY


def _input_fault(
    bench: Bench, buffer: str, eligible: Callable[[Any], range], change: Callable[[int], int]
) -> Injection:
    """Change one entry of the step's input buffers; `eligible` gives indices inside a request's chunk."""
    group = bench.rng.choice([group for group in bench.groups if not group.ring] or bench.groups)

    def attempt() -> tuple[str, int, float] | None:
        ios = bench.processor.inputs_and_outputs
        ios = ios.io_pairs[ios.current_pair].host_io if hasattr(ios, "io_pairs") else ios
        first = 0
        places = []
        for future in ios.requests_in_batch:
            start = future.state.position_offset - future.query_length
            places += [(str(future.state.request_id), first + i, int(start) + i) for i in eligible(future)]
            first += future.query_length
        if not places:
            return None
        request_id, index, position = bench.rng.choice(places)
        tensor = getattr(ios, buffer)
        tensor[index] = change(int(tensor[index]))
        if tensor.is_cuda:
            import torch

            torch.cuda.synchronize()
        return request_id, bench.slot_of(group, request_id, position), time.monotonic()

    request_id, slot, at = bench.behind_preparation(attempt)
    page = (group.number, slot // group.page_size)
    bench.avoid.add(page)
    # judged from what the step says, at its end: no stamp is needed
    return Injection(group=group, pages={page}, slots=[slot], requests={request_id}, settled=True, at=at)


def _own_tail(page_size: int) -> Callable[[Any], range]:
    """Prompt tokens in the prompt's last, unfinished page: no other request ever shares it, as it would share a wrong
    token's page in the prefix cache and spread the fault."""

    def eligible(future: Any) -> range:
        prompt = len(future.state.initial_tokens)
        start = future.state.position_offset - future.query_length
        first = max(0, prompt // page_size * page_size - start)
        return range(first, max(first, min(future.query_length, prompt - start)))

    return eligible


def _decoded(future: Any) -> range:
    return range(future.query_length if future.state.generated_tokens and future.query_length == 1 else 0)


def token_off_by_one(bench: Bench) -> Injection:
    """A prompt token of the step's input is one too high."""
    return _input_fault(
        bench, "input_ids", _own_tail(bench.groups[0].page_size), lambda token: (token + 1) % VOCABULARY
    )


def position_off_by_one(bench: Bench) -> Injection:
    """A decoded token's position in the step's input is one too high."""
    return _input_fault(bench, "position_ids", _decoded, lambda position: position + 1)

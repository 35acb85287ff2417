"""Findings under `on_finding="evict"`: readers fail, the block leaves the prefix cache, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from canaryd.engines.transformers.eviction import DAMAGED_BYTES, Eviction
from canaryd.engines.transformers.geometry import UnknownEngine, groups_of
from canaryd.wire.messages import Finding

from .conftest import Engine, prompts

SHARED = 48
MADE = prompts(21, 8, shared=SHARED, longest=30)


class Planter:
    """Gives the adapter one finding about a shared page, chosen on the engine's thread, and looks what became of it."""

    def __init__(self, engine: Engine) -> None:
        self.readers: set[str] = set()
        self.others: set[str] = set()
        self.kept: list[bool] = []
        """At the next step: whether a new request would still hit the page's content."""
        (group,) = groups_of(engine.manager.batch_processor)
        self._group, self._allocator = group.name, group.allocator
        self._hash = 0
        engine.recorder.poll_findings = self._poll  # type: ignore[method-assign]

    def _poll(self) -> list[Finding]:
        tables, ledger = self._allocator.block_table, self._allocator.ledger
        if self.readers:
            if not self.kept:
                self.kept.append(self._hash in ledger.hash_to_block)
            return []
        if len(tables) < len(MADE):
            return []
        held = {page: {name for name, table in tables.items() if page in table} for page in ledger.block_to_hash}
        page = max(held, key=lambda each: len(held[each]))
        self._hash, self.readers = ledger.block_to_hash[page], held[page]
        self.others = set(tables) - self.readers
        slot = page * self._allocator.tokens_per_page + 3
        return [Finding(id="a-1", check="content", group=self._group, slots=[(slot, slot)], slot_count=1)]


def serve(engine: Engine, made: list[list[int]]) -> dict[tuple[int, ...], Any]:
    engine.manager.add_requests(made)
    return {tuple(result.prompt_ids): result for result in engine.finish(len(made))}


def warm(engine: Engine) -> None:
    """One request, so that the head is cached and the recorder is there."""
    serve(engine, [MADE[1]])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_readers_fail_and_the_others_go_on(
    start: Callable[..., Engine],
    start_async: Callable[..., Engine],
    mode: str,
) -> None:
    begin = start if mode == "sync" else start_async
    healthy = begin(max_new_tokens=40)
    warm(healthy)
    expected = serve(healthy, MADE)
    healthy.manager.stop(block=True)

    engine = begin(max_new_tokens=40, on_finding="evict")
    warm(engine)
    planter = Planter(engine)
    results = serve(engine, MADE)
    assert len(planter.readers) > 1
    assert planter.others
    assert planter.kept == [False]
    by_name = {result.request_id: result for result in results.values()}
    assert {name for name, result in by_name.items() if result.error} == planter.readers
    assert all("a-1" in by_name[name].error for name in planter.readers)
    for name in planter.others:
        result = by_name[name]
        assert result.generated_tokens == expected[tuple(result.prompt_ids)].generated_tokens

    again = serve(engine, [MADE[1], MADE[2]])
    for prompt, result in again.items():
        assert not result.error
        assert result.generated_tokens == expected[prompt].generated_tokens
    eviction = engine.attachment.eviction
    assert eviction is not None
    assert (eviction.findings, eviction.requests) == (1, len(planter.readers))


def engine_of(tables: dict[str, list[int]], cached: list[int], tp_size: int = 1) -> Any:
    """As much of an engine as eviction touches; `calls` says what was done."""
    calls: list[Any] = []
    states = {name: SimpleNamespace(request_id=name, _status=Status()) for name in tables}
    ledger = SimpleNamespace(cached_blocks=dict.fromkeys(cached))
    allocator = SimpleNamespace(block_table=tables, ledger=ledger)
    scheduler = SimpleNamespace(
        active_requests=states,
        _requests_to_fork=[],
        block_new_requests=True,
        finish_request=lambda name: calls.append(("finish", name)),
    )
    cache = SimpleNamespace(
        free_blocks=lambda name, no_cache: calls.append(("free", name, no_cache)) or tables.pop(name),
        evict_cached_blocks=lambda: calls.append("evict cached"),
    )
    group = SimpleNamespace(name="g", allocator=allocator, page_size=4, first_page=2, num_pages=20)
    processor = SimpleNamespace(
        scheduler=scheduler,
        cache=cache,
        distributed_helper=SimpleNamespace(tp_size=tp_size),
        _handle_request_error=lambda error, state: calls.append(("fail", state.request_id, str(error))),
    )
    return SimpleNamespace(eviction=lambda: Eviction(processor, [group]), calls=calls, scheduler=scheduler, cache=cache)  # type: ignore[list-item]


class Status:
    FINISHED = "finished"


def finding(*ranges: tuple[int, int], count: int | None = None, check: str = "content", group: str = "g") -> Finding:
    named = sum(last - first + 1 for first, last in ranges)
    return Finding(id="a-9", check=check, group=group, slots=list(ranges), slot_count=count or named)


def freed(engine: Any) -> list[str]:
    return [call[1] for call in engine.calls if call[0] == "free"]


@pytest.mark.parametrize(
    ("found", "readers"),
    [
        (finding((19, 19)), []),
        (finding((20, 23)), ["a", "b"]),
        (finding((23, 28)), ["a", "b", "c"]),
        (finding((-8, 8)), []),
        (finding((28, 1 << 60)), ["b", "c"]),
        (finding((19, 19), count=2), ["a", "b", "c"]),
        (finding((20, 23), group="other"), []),
    ],
)
def test_who_reads_what_a_finding_names(found: Finding, readers: list[str]) -> None:
    engine = engine_of({"a": [5], "b": [5, 7], "c": [8, 7]}, [])
    engine.eviction().evict([found])
    assert freed(engine) == readers
    assert ("evict cached" in engine.calls) == bool(readers)


def test_an_idle_cached_block_is_evicted() -> None:
    engine = engine_of({"a": [5]}, [9])
    engine.eviction().evict([finding((36, 36))])
    assert engine.calls == ["evict cached"]


@pytest.mark.parametrize("check", ["owner", "token", "position", "chain", "range", "input", "lifetime"])
def test_a_doubtful_table_is_left_alone(check: str) -> None:
    assert check not in DAMAGED_BYTES
    engine = engine_of({"a": [5]}, [5])
    engine.eviction().evict([finding((20, 20), check=check)])
    assert engine.calls == []


def test_a_request_about_to_be_forked_is_failed_behind_the_fork() -> None:
    engine = engine_of({"a": [5]}, [])
    eviction = engine.eviction()
    engine.scheduler._requests_to_fork.append(engine.scheduler.active_requests["a"])
    eviction.evict([finding((20, 20))])
    assert engine.calls == []
    engine.scheduler._requests_to_fork.clear()
    eviction.evict([])
    assert freed(engine) == ["a"]


def test_one_rank_of_several_is_left_alone() -> None:
    with pytest.raises(UnknownEngine, match="one rank"):
        engine_of({}, [], tp_size=2).eviction()


def test_an_engine_that_cannot_evict_is_left_alone() -> None:
    engine = engine_of({}, [])
    del engine.cache.evict_cached_blocks
    with pytest.raises(UnknownEngine, match="how to evict"):
        engine.eviction()


def test_without_the_option_findings_are_not_acted_on(start: Callable[..., Engine]) -> None:
    engine = start()
    warm(engine)
    planter = Planter(engine)
    assert not any(result.error for result in serve(engine, MADE).values())
    assert not planter.readers, "nobody asked"
    assert engine.attachment.eviction is None

"""Acting on findings: readers of a damaged block are failed, and the block leaves the prefix cache.

What a reader computed since the damage may be wrong, in its later blocks as in its answer. So all of a reader's blocks
are freed without being kept, and the idle cached blocks, whose ancestors the engine does not record, go as well; both
by the engine's own methods, on its own thread, between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from canaryd.engines.transformers.geometry import Group, UnknownEngine
from canaryd.errors import CacheDamaged
from canaryd.wire.messages import Finding

logger = logging.getLogger("canaryd.engines.transformers")

DAMAGED_BYTES = frozenset({"content", "copy", "landed", "nonfinite"})
"""Checks that speak of bytes. Where a table may be wrong, freeing by that table would damage the allocator."""


class Eviction:
    """Evicts what findings name. On the engine's thread, between two steps.

    Raises UnknownEngine for an engine without the methods that this needs, and for one of several ranks: they schedule
    alike, and one alone must not change its tables.
    """

    def __init__(self, processor: Any, groups: Sequence[Group]) -> None:
        self._processor = processor
        self._groups = {group.name: group for group in groups}
        self._waiting: list[Finding] = []
        self.findings = 0
        """Findings acted on."""
        self.requests = 0
        """Requests failed."""
        needed = (
            (processor, ("_handle_request_error",)),
            (processor.cache, ("free_blocks", "evict_cached_blocks")),
            (processor.scheduler, ("_requests_to_fork", "active_requests", "finish_request")),
        )
        if not all(hasattr(holder, name) for holder, names in needed for name in names):
            raise UnknownEngine("canaryd only reports findings to this engine: it does not know how to evict from it")
        if getattr(getattr(processor, "distributed_helper", None), "tp_size", 1) > 1:
            raise UnknownEngine("canaryd only reports findings to this engine: eviction needs an engine of one rank")

    def evict(self, findings: Sequence[Finding]) -> None:
        """Act on findings about bytes; those whose readers are about to be forked wait for the next call."""
        if not (findings or self._waiting):
            return
        waiting, self._waiting = self._waiting, []
        for finding in [*waiting, *findings]:
            if finding.check in DAMAGED_BYTES and finding.group in self._groups:
                self._evict(finding)

    def _evict(self, finding: Finding) -> None:
        group = self._groups[finding.group]
        pages = _pages(finding, group)
        readers = [name for name, table in group.allocator.block_table.items() if not pages.isdisjoint(table)]
        scheduler = self._processor.scheduler
        if any(state.request_id in readers for state in scheduler._requests_to_fork):
            self._waiting.append(finding)
            return
        for request_id in readers:
            self._fail(request_id, finding)
        if readers or not pages.isdisjoint(group.allocator.ledger.cached_blocks):
            self._processor.cache.evict_cached_blocks()
        self.findings += 1
        self.requests += len(readers)
        logger.warning("finding %s (%s): evicted, %d requests failed", finding.id, finding.check, len(readers))

    def _fail(self, request_id: str, finding: Finding) -> None:
        processor, scheduler = self._processor, self._processor.scheduler
        state = scheduler.active_requests.get(request_id)
        if state is not None:
            damaged = CacheDamaged(f"the KV cache of this request was damaged (canaryd's finding {finding.id})")
            processor._handle_request_error(damaged, state)
            # a step in flight may still have a token for it; the engine passes over those of finished requests. Not
            # by the setter, which is for a request's own course
            state._status = type(state._status).FINISHED
        processor.cache.free_blocks(request_id, no_cache=True)
        scheduler.finish_request(request_id)
        scheduler.block_new_requests = False


def _pages(finding: Finding, group: Group) -> set[int]:
    """Pages of the finding inside the group; all, where it could not name every slot."""
    last_page = group.num_pages - 1
    if sum(last - first + 1 for first, last in finding.slots) < finding.slot_count:
        return set(range(group.first_page, group.num_pages))
    pages: set[int] = set()
    for first, last in finding.slots:
        pages.update(range(max(0, first // group.page_size), min(last // group.page_size, last_page) + 1))
    return pages

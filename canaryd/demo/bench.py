"""What a fault needs of the engine: its pool byte by byte, its tables between two steps, the daemon's word on a slot.

Everything here lives in the engine's process. Nothing of the daemon is touched but its public pages.
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from canaryd.engines.transformers.geometry import Group, groups_of

T = TypeVar("T")

_FENCE_TOKENS = 4
_TRIES = 8
STEP_SECONDS = 5.0
"""How long an action may wait for the engine's next step."""


class NoTarget(Exception):
    """There is nothing in the engine just now that this fault could hit."""


@dataclass(frozen=True)
class Guard:
    """The daemon's word on one slot; state "" if it has none."""

    state: str
    generation: int


@dataclass(eq=False)
class Fence:
    """A fault of tables that must be taken back before one of `requests` ends: a damaged table that is freed would
    damage the allocator, and the engine for good. `back` runs on the engine's thread, once.

    `steps`: for how many steps the fault stands at most, 0 for as long as its requests. `gone`: taken back."""

    requests: frozenset[str]
    back: Callable[[], None]
    steps: int = 0
    gone: bool = False


@dataclass
class Recovery:
    """What became of a damaged block of a shared prefix: seconds from the fault until it had left the prefix cache and
    until a new request had computed it again, and how many readers were failed."""

    evicted_s: float | None = None
    recomputed_s: float | None = None
    failed: int = 0

    def document(self) -> dict[str, Any]:
        """As it stands in the JSON report; None: it did not happen."""
        seconds = {"evicted_s": self.evicted_s, "recomputed_s": self.recomputed_s}
        rounded = {name: None if value is None else round(value, 3) for name, value in seconds.items()}
        return {**rounded, "failed": self.failed}


class Pool:
    """The bytes of the engine's cache tensor."""

    def __init__(self, cache: Any, groups: list[Group]) -> None:
        self._bytes: torch.Tensor = cache.cache_tensor
        self.dtype: torch.dtype = groups[0].allocator.cache_dtype
        self.groups = groups

    def read(self, offset: int, size: int) -> bytearray:
        """A copy of `size` bytes at `offset`."""
        return bytearray(self._bytes[offset : offset + size].cpu().numpy().tobytes())

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Overwrite the bytes at `offset`; on a GPU complete when it returns."""
        fresh = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with torch.inference_mode():
            self._bytes[offset : offset + len(data)].copy_(fresh)
        if self._bytes.is_cuda:
            torch.cuda.synchronize()

    def row_bytes(self, group: Group) -> int:
        """Bytes of one token in one layer's K or V."""
        return int(group.allocator.bytes_per_page) // (2 * group.page_size)

    def page_span(self, group: Group, page: int) -> tuple[int, int]:
        """Offset and size of a page of all layers."""
        size = int(group.allocator.bytes_per_block)
        return page * size, size

    def layer_span(self, group: Group, page: int, part: int) -> tuple[int, int]:
        """Offset and size of a page of part `part`: K and V of the group's layers in turn."""
        size = group.page_size * self.row_bytes(group)
        return self.page_span(group, page)[0] + part * size, size

    def parts(self, group: Group) -> int:
        """Twice the number of the group's layers."""
        return 2 * len(group.allocator.layer_indices)

    def row_span(self, group: Group, slot: int, part: int) -> tuple[int, int]:
        """Offset and size of a slot in one part."""
        page, offset = divmod(slot, group.page_size)
        row = self.row_bytes(group)
        return self.layer_span(group, page, part)[0] + offset * row, row


class Bench:
    """The engine as faults see it.

    Args:
        manager: the engine's `ContinuousBatchingManager`, running.
        daemon: the daemon's address.
        engine: the engine's name there.
        rng: the source of all choices.
    """

    def __init__(self, manager: Any, daemon: str, engine: str, rng: random.Random, *, step_seconds: float) -> None:
        self.manager = manager
        self.processor = manager.batch_processor
        self.cache = self.processor.cache
        self.groups = groups_of(self.processor)
        self.pool = Pool(self.cache, self.groups)
        self.rng = rng
        self.avoid: set[tuple[int, int]] = set()
        """Pages (group, page) under another fault."""
        self.owners: list[dict[int, str]] = [{} for _ in self.groups]
        self.inherited: list[set[int]] = [set() for _ in self.groups]
        """Pages that changed from one request to another without being shared."""
        self.recoveries: list[Recovery] = []
        """Damaged prefixes of an engine that evicts."""
        self.requests_evicted: Callable[[], int] = lambda: 0
        """How many requests an engine that evicts has failed."""
        self.prefer_settled = False
        """Whether `pick_slot` looks for a slot that the daemon guards, instead of any."""
        self._daemon = daemon
        self._engine = engine
        self._step_seconds = step_seconds
        self._before: deque[Callable[[], None]] = deque()
        self._behind: deque[Callable[[], bool]] = deque()
        self._lock = threading.Lock()
        self._fences: dict[Fence, int] = {}  # and the step at which each was put up
        self._steps = 0
        self._prepare = self.processor.prepare_next_batch
        self.processor.prepare_next_batch = self._prepare_next_batch

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _prepare_next_batch(self) -> bool:
        """Runs what waits: before a batch is prepared, and between its preparation and its forward."""
        time.sleep(self._step_seconds)
        self._steps += 1
        if self._steps % 8 == 0:
            self._note_owners()
        with self._lock:
            before, self._before = self._before, deque()
        self._watch_fences()
        for action in before:
            action()
        ready: bool = self._prepare()
        if ready:
            with self._lock:
                behind = list(self._behind)
            for attempt in behind:
                if attempt():
                    self._behind.remove(attempt)
        return ready

    def _note_owners(self) -> None:
        for group, owners, inherited in zip(self.groups, self.owners, self.inherited, strict=True):
            tables = group.allocator.block_table
            for request_id, table in tables.items():
                for page in table:
                    before = owners.get(page)
                    if before is not None and before != request_id and before not in tables:
                        inherited.add(page)
                    owners[page] = request_id

    def between_steps(self, action: Callable[[], T]) -> T:
        """Run `action` on the engine's thread while no step is prepared or running."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(action())
            except Exception as error:  # noqa: BLE001 - raised again on the thread that asked
                done.set_exception(error)

        with self._lock:
            self._before.append(run)
        return done.result(STEP_SECONDS)

    def behind_preparation(self, attempt: Callable[[], T | None], seconds: float = STEP_SECONDS) -> T:
        """Run `attempt` between the preparation of a batch and its forward until it returns something.

        Raises NoTarget if it did not within `seconds`.
        """
        done: Future[T] = Future()

        def run() -> bool:
            try:
                result = attempt()
            except Exception as error:  # noqa: BLE001 - raised again on the thread that asked
                done.set_exception(error)
                return True
            if result is not None:
                done.set_result(result)
            return result is not None

        with self._lock:
            self._behind.append(run)
        try:
            return done.result(seconds)
        except TimeoutError:
            with self._lock:
                if run in self._behind:
                    self._behind.remove(run)
            raise NoTarget("no step of the kind came by") from None

    def behind_each_preparation(self, watch: Callable[[], bool]) -> None:
        """Run `watch` on the engine's thread behind the preparation of each batch until it returns True."""
        with self._lock:
            self._behind.append(watch)

    # --- faults that must not outlive their requests ----------------------------------------------------------------

    def fence(self, fence: Fence) -> None:
        """Take `fence` back at the latest when one of its requests is about to end. On the engine's thread."""
        self._fences[fence] = self._steps

    def _watch_fences(self) -> None:
        for fence in list(self._fences):
            ending = any(self.tokens_left(request_id) <= _FENCE_TOKENS for request_id in fence.requests)
            if ending or (fence.steps and self._steps - self._fences[fence] >= fence.steps):
                self.take_back(fence)

    def take_back(self, fence: Fence) -> None:
        """Take it back, if that did not happen yet. On the engine's thread."""
        if fence in self._fences:
            del self._fences[fence]
            fence.gone = True
            fence.back()

    def tokens_left(self, request_id: str) -> int:
        """Tokens that a request still has to come; 0 if it does not run. On the engine's thread."""
        state = self.processor.scheduler.active_requests.get(request_id)
        if state is None:
            return 0
        return len(state.initial_tokens) + (state.max_new_tokens or 0) - int(state.position_offset)

    # --- what is there ----------------------------------------------------------------------------------------------

    def running(self) -> dict[str, Any]:
        """States of the requests that hold pages in every group, by id. On the engine's thread."""
        states = self.processor.scheduler.active_requests
        return {
            request_id: state
            for request_id, state in states.items()
            if all(request_id in group.allocator.block_table for group in self.groups)
        }

    def written(self, group: Group, state: Any) -> range:
        """Positions of a running request that the group holds and that a finished step wrote."""
        length = max(0, state.position_offset - 1)
        return range(max(0, length - group.ring + 1) if group.ring else 0, length)

    def slot_of(self, group: Group, request_id: str, position: int) -> int:
        """Where a running request keeps a position. On the engine's thread."""
        kept = position % group.ring if group.ring else position
        page, offset = divmod(kept, group.page_size)
        return int(group.allocator.block_table[request_id][page]) * group.page_size + offset

    def pick_slot(self) -> tuple[Group, int]:
        """A random slot that holds a token, of a running request or of an idle cached prefix."""

        def pick() -> tuple[Group, int]:
            group = self.rng.choice(self.groups)
            cached = list(group.allocator.ledger.cached_blocks)
            if cached and self.rng.random() < 0.25:
                return group, self.rng.choice(cached) * group.page_size + self.rng.randrange(group.page_size)
            running = self.running()
            for _ in range(32):
                request_id = self.rng.choice(list(running)) if running else ""
                positions = self.written(group, running[request_id]) if running else range(0)
                if positions:
                    slot = self.slot_of(group, request_id, self.rng.choice(positions))
                    if (group.number, slot // group.page_size) not in self.avoid:
                        return group, slot
            raise NoTarget("no request holds a token")

        for _ in range(_TRIES if self.prefer_settled else 0):
            group, slot = self.between_steps(pick)
            if self.ask(group, slot).state == "settled":
                return group, slot
        return self.between_steps(pick)

    def holders(self, group: Group, page: int) -> list[str]:
        """Requests that hold the page. On the engine's thread."""
        return [request_id for request_id, table in group.allocator.block_table.items() if page in table]

    def retire(self, pages: set[tuple[int, int]], requests: set[str]) -> None:
        """End the requests and everybody who holds the pages, and keep the pages out of the prefix cache."""

        def cancel() -> None:
            doomed = set(requests)
            for group, page in pages:
                doomed.update(self.holders(self.groups[group], page))
                self._forget_hash(self.groups[group], page)
            for fence in [fence for fence in self._fences if fence.requests & doomed]:
                self.take_back(fence)
            for request_id in doomed:
                self.end_request(request_id)

        def forget() -> None:
            for group, page in pages:
                self._forget_hash(self.groups[group], page)

        self.between_steps(cancel)
        self.between_steps(lambda: None)
        self.between_steps(forget)

    def fresh_pages(self, group: Group) -> list[int]:
        """One free page of the group, or none if the pool is full. On the engine's thread."""
        pool = self.cache.pool
        if not pool.count_free_blocks(group.number) and pool.num_free_sectors:
            pool.allocate_sector(group.number)
        return list(pool.get_free_blocks(group.number, min(1, pool.count_free_blocks(group.number))))

    def end_request(self, request_id: str) -> None:
        """End a request before its time. On the engine's thread."""
        scheduler = self.processor.scheduler
        state = scheduler.active_requests.get(request_id)
        if self.processor.use_async_batching and state is not None:
            # transformers 5.24 frees a cancelled request's tables while its step is in flight, and fails when that
            # step ends: let the next token be its last instead
            state._new_tokens_limit = len(state.generated_tokens) + 1
        else:
            scheduler.set_request_cancellation(request_id)

    def _forget_hash(self, group: Group, page: int) -> None:
        ledger = group.allocator.ledger
        known = ledger.block_to_hash.pop(page, None)
        if known is not None:
            ledger.hash_to_block.pop(known, None)
        if page in ledger.cached_blocks:
            del ledger.cached_blocks[page]
            self.cache.pool.free_blocks(group.number, [page])

    # --- the daemon's word ------------------------------------------------------------------------------------------

    def ask(self, group: Group, slot: int) -> Guard:
        """What the daemon knows of a slot."""
        query = urllib.parse.urlencode({"engine": self._engine, "group": group.name, "slot": slot})
        try:
            with urllib.request.urlopen(f"{self._daemon}/slot?{query}", timeout=3) as answer:  # noqa: S310 - our own daemon
                document = json.load(answer)
        except (OSError, ValueError):
            return Guard("", -1)
        return Guard(str(document.get("state", "")), int(document.get("generation", -1)))

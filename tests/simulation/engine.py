"""A simulated engine around the real client: it does what real ones do, and tells it as an adapter does.

The scheduler, the device's queues and the client's thread move apart from each other; `turn` moves the scheduler by
one decision, `work` the device by some steps.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from canaryd.client.facts import Final, SnapshotState, page_set
from canaryd.client.ops import Ops
from canaryd.client.stream import Stream
from tests.simulation.features import PAGE, Features
from tests.simulation.memory import FULL, I64, SECOND, Pool
from tests.simulation.requests import Op, Opening, Pages, Request, Segment, Told

MAX_OPS = 2
VOCABULARY = 1000
NEVER_ENDS = 1 << 60
"""Stands for an op behind which nothing of a page is promised."""


class Engine:
    """One engine process: `ops` is the client that its sender's thread empties."""

    def __init__(self, features: Features, rng: random.Random, pool: Pool) -> None:
        self.features = features
        self.pool = pool
        self._rng = rng
        limit = 6 if features.small_queue else 4096
        self.ops = Ops(Stream(limit=limit, limit_bytes=1 << 26), self._snapshot, idle_seconds=0)
        self.groups = range(len(pool.page_sizes))
        self.pages = Pages(rng, [pool.num_pages] * len(pool.page_sizes), shared=pool.overlay)
        self.pages.on_free = self._freed
        self.told = Told()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.under_way: deque[Op] = deque()
        self.queue: deque[Op] = deque()
        self.load: Op | None = None
        self.draining = False
        self.steps = 0
        self.slot_writes = 0
        self.off = False
        self._closing: list[tuple[str, int]] = []
        self._freeing: list[tuple[int, int, int]] = []
        self._left_at: dict[tuple[int, int], int] = {}
        self._remaps: list[tuple[Request, int, list[int], int]] = []
        self._unended: dict[int, Op] = {}
        self._last_group: dict[int, int] = {}
        self._names = 0
        self._documents = [self._draw_tokens(14 * PAGE) for _ in range(3)]

    # --- the scheduler ------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """One decision of the scheduler."""
        rng = self._rng
        if not self.draining and len(self.running) + len(self.waiting) < self.features.requests and rng.random() < 0.5:
            self._arrive()
        limit = MAX_OPS if self.features.asynchronous else 1
        first = self.under_way[0] if self.under_way else None
        ready = first is not None and (first.query() if self.features.direct_ends else first.has_output)
        if ready and (len(self.under_way) >= limit or self.draining or rng.random() < 0.7):
            self._process(self.under_way.popleft())
        elif self.load is not None and self.load.query():
            self._finish_load(self.load)
        elif len(self.under_way) < limit and not self.draining:
            self._schedule()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self.under_way and self.load is None

    def _draw_tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]

    def _arrive(self) -> None:
        rng = self._rng
        document = self._documents[rng.randrange(3)]
        prompt = document[: rng.randrange(1, len(document))] + self._draw_tokens(rng.randrange(1, 4 * PAGE))
        self._enqueue(prompt, rng.randrange(1, 4 * PAGE), self.features.hidden_ids and rng.random() < 0.3)

    def _enqueue(self, prompt: list[int], target: int, hidden: bool) -> None:
        self._names += 1
        self.waiting.append(Request(name=f"r{self._names}", prompt=prompt, target=target, hidden=hidden))

    def _begin(self, lane: str = "main", pages: list[int] | None = None) -> Op:
        scope = None if pages is None else [page_set(FULL, pages)]
        op = Op(number=self.ops.begin(lane, scope, 0))
        self._unended[op.number] = op
        return op

    def _schedule(self) -> None:
        rng, features = self._rng, self.features
        if features.loads and self.load is None and self.waiting and rng.random() < 0.2 and not features.second:
            self._start_load()
        op = self._begin()
        self.steps += 1
        if features.preemption and self.running and rng.random() < 0.04:
            self._preempt(self.running[rng.randrange(len(self.running))])
        while self.waiting and rng.random() < 0.6 and self._admit(op, self.waiting[0]):
            self.waiting.pop(0)
        # What was built on a failed op fails too.
        doomed = any(other.status == "failed" for other in self.under_way)
        if doomed or (features.failures and rng.random() < 0.03):
            op.status = "failed"
        budget = features.budget
        for request in rng.sample(self.running, len(self.running)):
            if budget > 0 and rng.random() < 0.9:
                budget -= self._extend(op, request, budget)
        if features.forks and rng.random() < 0.1 and not features.rejected_tokens:
            self._fork(op)
        self._launch(op)

    def _admit(self, op: Op, request: Request) -> bool:
        """Opens the request's row in this op, on cached pages where there are any."""
        if not self._open_pages(op, request):
            return False
        if self.features.prefix_cache:
            request.pages[FULL] = self.pages.hit(request.prompt)
            for page in request.pages[FULL]:
                self.pages.hold(page)
        request.gpu_length = request.done = request.scheduled = len(request.pages[FULL]) * PAGE
        self.running.append(request)
        self._opens(op, request, request.scheduled)
        return True

    def _open_pages(self, op: Op, request: Request) -> bool:
        request.pages = [[] for _ in self.groups]
        if self.features.second:
            count = -(-self.pool.rings[SECOND] // self.pool.page_sizes[SECOND])
            taken = self._take(op, SECOND, count)
            if taken is None:
                return False
            request.pages[SECOND] = taken
        return True

    def _opens(self, op: Op, request: Request, length: int, *, copied: bool = False) -> None:
        ids = [] if request.hidden else [*request.prompt, *request.tokens]
        request.opening_op = op.number
        op.openings.append(Opening(request, [list(pages) for pages in request.pages], length, ids, copied))

    def _take(self, op: Op, group: int, count: int) -> list[int] | None:
        """Pages for an op, zeroed if this engine does that."""
        taken = self.pages.take(group, count)
        if not taken:
            return taken
        if self.pool.overlay:
            for page in taken:
                before = self._last_group.get(page, group)
                if before != group:
                    op.voids.setdefault(before, []).append(page)
                self._last_group[page] = group
        op.touched.update((group, page) for page in taken)
        # From here on the pages may change, and nothing that was in them counts.
        self.pool.give_up(group, taken, op.number)
        if self.features.zeroing:
            op.voids.setdefault(group, []).extend(taken)
            op.steps.append(lambda: self.pool.zero(group, taken, op.number))
        return taken

    def _extend(self, op: Op, request: Request, budget: int) -> int:
        """Schedules the request's next tokens; how many."""
        first = request.scheduled
        left = len(request.prompt) - first
        if left <= 0 and self.features.rejected_tokens:
            count = min(self._rng.randrange(1, 5), request.limit - first)
        else:
            count = min(max(left, 1), budget, request.limit - first)
        needed = -(-(first + count) // PAGE) - len(request.pages[FULL])
        if count <= 0:
            return 0
        if needed > 0:
            fresh = self._take(op, FULL, needed)
            if fresh is None:
                return 0
            request.pages[FULL].extend(fresh)
        segment = Segment(request, count, [np.array(pages, dtype=np.int64) for pages in request.pages])
        op.segments.append(segment)
        op.touched.update((FULL, page) for page in request.pages[FULL][max(0, request.done) // PAGE :])
        if self.features.second:
            op.touched.update((SECOND, page) for page in request.pages[SECOND])
        request.scheduled += count
        request.last_op = op.number
        if self.features.prefix_cache and self.features.early_registration and op.status == "done":
            known = min(request.scheduled, len(request.prompt))
            self.pages.register(request.prompt, request.pages[FULL], first // PAGE, known // PAGE)
        return count

    def _launch(self, op: Op) -> None:
        rng = self._rng
        segments = op.segments
        parts = rng.randrange(1, 4)
        late: list[int] = [SECOND] if self.features.drafter and self.features.second else []
        for part in range(parts):
            chosen = segments[part::parts]
            if chosen:
                op.steps.append(lambda chosen=chosen: self._execute(op, chosen, late))
        if self.features.padding:
            op.steps.append(lambda: self.pool.write(FULL, np.array([rng.randrange(PAGE)]), op.number))
        for group, sources, destinations in op.copies:
            op.steps.append(lambda g=group, s=sources, d=destinations: self.pool.copy(g, s, d, op.number))
        if late and segments:
            op.steps.append(lambda: self._write_group(op, segments, SECOND))
            op.late_steps = 1
        op.steps.append(lambda: None)
        if op.status == "failed":
            for _ in range(rng.randrange(len(op.steps))):
                op.steps.pop()
            op.late_steps = 0
            # Its end voids all that it may have touched.
            for group in self.groups:
                self.pool.give_up(group, [page for of, page in op.touched if of == group], op.number)
        self.under_way.append(op)
        self.queue.append(op)
        if not self.features.direct_ends:
            self.ops.end_after(op.number, [op], op.status, lambda: self._final(op), 0)

    # --- the device ---------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Some steps of the device: each lane in its order."""
        for _ in range(self._rng.randrange(1, 4)):
            while self.queue and not self.queue[0].steps:
                self.queue.popleft()
            if self.load is not None and self.load.steps and self._rng.random() < 0.3:
                self.load.steps.popleft()()
            elif self.queue:
                self.queue[0].steps.popleft()()

    def _execute(self, op: Op, segments: list[Segment], late: list[int]) -> None:
        for segment in segments:
            request = segment.request
            segment.first = request.gpu_length
            last = segment.first + segment.count
            missing = last - len(request.prompt) - len(request.tokens)
            if missing > 0:
                request.tokens.extend(self._draw_tokens(missing))
            ids = [*request.prompt, *request.tokens]
            segment.tokens = ids[segment.first : last]
            segment.accepted = segment.count
            if self.features.rejected_tokens and segment.first >= len(request.prompt):
                segment.accepted = self._rng.randrange(1, segment.count + 1)
                del request.tokens[segment.first + segment.accepted - len(request.prompt) :]
            request.gpu_length = segment.first + segment.accepted
            self.slot_writes += segment.count
        for group in self.groups:
            if group not in late:
                self._write_group(op, segments, group)

    def _write_group(self, op: Op, segments: list[Segment], group: int) -> None:
        ring, size = self.pool.rings[group], self.pool.page_sizes[group]
        written = op.writes.setdefault(group, [])
        for segment in segments:
            last = segment.first + segment.count
            positions = np.arange(max(segment.first, last - ring) if ring else segment.first, last)
            places = positions % ring if ring else positions
            written.append((segment, positions, segment.pages[group][places // size] * size + places % size))
        self.pool.write(group, np.concatenate([entry[2] for entry in written[-len(segments) :]]), op.number)

    # --- endings ------------------------------------------------------------------------------------------------------

    def _final(self, op: Op) -> Final:
        """What the op's end tells, made when the end is: closes and frees of the meantime with it."""
        final = Final()
        closing = [name for name, least in self._closing if least <= op.number]
        self._closing = [entry for entry in self._closing if entry[1] > op.number]
        for name in closing:
            final.close(name)
            self.told.rows.pop(name, None)
        for opening in op.openings:
            self._tell_opening(final, opening, failed=op.status == "failed")
        remaps, self._remaps = self._remaps, []
        for request, start, pages, least in remaps:
            if least > op.number:
                self._remaps.append((request, start, pages, least))
            elif request.name in self.told.rows:
                final.remap(request.name, FULL, start, pages)
                self.told.moved(request.name, start, pages)
        self._tell_content(final, op)
        freed = [entry for entry in self._freeing if entry[2] <= op.number]
        self._freeing = [entry for entry in self._freeing if entry[2] > op.number]
        if self.features.frees:
            for group in self.groups:
                # Pages that were handed out again are not free: what this end names of them counts.
                free = self.pages.free[group]
                final.free(group, [page for of, page, _ in freed if of == group and page in free])
        op.ended = True
        del self._unended[op.number]
        return final

    def _tell_opening(self, final: Final, opening: Opening, *, failed: bool) -> None:
        request = opening.request
        # Copies of a failed op are not told, so that the row that they were made for holds nothing.
        length = 0 if failed and opening.copied else opening.length
        for group, pages in enumerate(opening.pages):
            final.open(request.name, group, pages, length, ids=opening.ids)
        request.told = True
        self.told.open(request, opening.pages, length)

    def _tell_content(self, final: Final, op: Op) -> None:
        voids = {group: list(pages) for group, pages in op.voids.items()}
        if op.status == "failed":
            for group, page in op.touched:
                voids.setdefault(group, []).append(page)
        for group, pages in voids.items():
            final.void(group, sorted(set(pages)))
        if op.status == "failed":
            return
        for group, entries in op.writes.items():
            ring = self.pool.rings[group]
            tokens = [s.tokens[-ring:] if ring else s.tokens for s, _, _ in entries]
            final.write(
                group,
                [segment.request.name for segment, _, _ in entries],
                [positions.size for _, positions, _ in entries],
                np.concatenate([positions for _, positions, _ in entries]),
                [token for part in tokens for token in part],
                np.concatenate([slots for _, _, slots in entries]),
            )
        for segment in op.segments:
            self.told.wrote(segment)
        for group, sources, destinations in op.copies:
            final.copy(group, sources, destinations)

    def _process(self, op: Op) -> None:
        """The scheduler reads an op's output: requests end, pages are registered, shared and freed."""
        if op.status == "failed":
            self._fail(op)
        for segment in op.segments:
            request = segment.request
            if request not in self.running:
                continue
            request.done = segment.first + segment.accepted
            request.scheduled -= segment.count - segment.accepted
            if self.features.prefix_cache:
                ids = [*request.prompt, *request.tokens]
                self.pages.register(ids, request.pages[FULL], segment.first // PAGE, request.done // PAGE)
            if request.done >= request.limit:
                self._close(request)
        if self.features.dedup and op.status == "done":
            self._dedup(op)
        if self.features.direct_ends:
            self.ops.end(op.number, op.status, self._final(op), 0)

    def _fail(self, op: Op) -> None:
        """Nothing that is under way can be trusted: everything that runs starts again."""
        for other in [op, *self.under_way]:
            for group, page in sorted(other.touched):
                if group == FULL and self.pages.forget(page) and not self.pages.references.get(page):
                    self.pages.give(FULL, page)
        for request in list(self.running):
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        """Gives all pages back; the request starts again under a new row."""
        self._close(request)
        ids = [*request.prompt, *request.tokens][: max(len(request.prompt), request.done)]
        self._enqueue(ids, max(1, request.limit - len(ids)), request.hidden)

    def _close(self, request: Request) -> None:
        self.running.remove(request)
        least = request.last_op if self.features.late_closes else 0
        if not request.told:
            # What an end opens it cannot close: closed rows come first in it.
            least = max(least, request.opening_op + 1)
        self._closing.append((request.name, least))
        for group, pages in enumerate(request.pages):
            for page in pages:
                self._leaves(group, page, least)

    def _leaves(self, group: int, page: int, least: int) -> None:
        """A row gives a page back, which ops before `least` do not tell."""
        self._left_at[group, page] = max(least, self._left_at.get((group, page), 0))
        if group == FULL:
            self.pages.release(page)
        else:
            self.pages.give(group, page)

    def _freed(self, group: int, page: int) -> None:
        self._freeing.append((group, page, self._left_at.pop((group, page), 0)))
        if self.features.frees:
            self.pool.give_up(group, [page], NEVER_ENDS)

    def _dedup(self, op: Op) -> None:
        """Rows move to the cached copy of a page that they computed themselves."""
        for request in self.running:
            if not request.told or self._rng.random() < 0.5:
                continue
            ids = [*request.prompt, *request.tokens]
            for index in range(request.done // PAGE):
                page = request.pages[FULL][index]
                other = self.pages.prefix.get(tuple(ids[: (index + 1) * PAGE]))
                if other is None or other == page:
                    continue
                self.pages.hold(other)
                request.pages[FULL][index] = other
                self._leaves(FULL, page, op.number)
                self._remaps.append((request, index, request.pages[FULL][index:], op.number))

    # --- forks and loads ----------------------------------------------------------------------------------------------

    def _fork(self, op: Op) -> None:
        """A new row with the content of another: complete pages shared, the rest copied behind the op's writes."""
        busy = {segment.request for other in [op, *self.under_way] for segment in other.segments}
        able = [request for request in self.running if request not in busy and request.told and request.done]
        if not able or len(self.running) > self.features.requests:
            return
        parent = able[self._rng.randrange(len(able))]
        length = parent.gpu_length
        self._names += 1
        child = Request(f"r{self._names}", list(parent.prompt), parent.target, parent.hidden)
        if not self._open_pages(op, child):
            return
        whole = length // PAGE
        moved: list[int] | None = self._take(op, FULL, 1) if length % PAGE else []
        if moved is None:
            for page in child.pages[SECOND] if self.features.second else []:
                self.pages.give(SECOND, page)
            return
        for page in parent.pages[FULL][:whole]:
            self.pages.hold(page)
        child.pages[FULL] = parent.pages[FULL][:whole] + moved
        child.tokens = parent.tokens[: max(0, length - len(parent.prompt))]
        child.gpu_length = child.done = child.scheduled = length
        child.last_op = op.number
        if moved:
            within = np.arange(length % PAGE)
            self._copies(op, FULL, parent.pages[FULL][whole] * PAGE + within, moved[0] * PAGE + within)
        if self.features.second:
            size = self.pool.page_sizes[SECOND]
            places = np.arange(min(length, self.pool.rings[SECOND]))
            source, target = (np.array(r.pages[SECOND])[places // size] * size for r in (parent, child))
            self._copies(op, SECOND, source + places % size, target + places % size)
        self.running.append(child)
        self._opens(op, child, length, copied=True)

    @staticmethod
    def _copies(op: Op, group: int, sources: I64, destinations: I64) -> None:
        op.copies.append((group, sources, destinations))

    def _start_load(self) -> None:
        """Fetches the first pages of a prompt in an op of its own, with a scope. Pages may change lanes only when all
        that was said of them is in the stream."""
        request = self.waiting[0]
        count = len(request.prompt) // PAGE
        if not count:
            return
        limbo = {page for op in self._unended.values() for group, page in op.touched}
        limbo |= {page for _, page, _ in self._freeing} | {page for _, _, pages, _ in self._remaps for page in pages}
        limbo |= {page for name, _ in self._closing for page in self.told.pages(name)}
        free = self.pages.free[FULL]
        able = [page for page in free if page not in limbo]
        if len(able) < count:
            return
        chosen = able[:count]
        op = self._begin("load", chosen)
        for page in chosen:
            free.remove(page)
        self.pages.references.update(dict.fromkeys(chosen, 1))
        self.pool.give_up(FULL, chosen, op.number)
        op.touched.update((FULL, page) for page in chosen)
        self.waiting.pop(0)
        request.pages = [list(chosen)]
        request.last_op = op.number
        if self.features.aborted_loads and self._rng.random() < 0.3:
            op.status = "aborted"
        segment = Segment(request, count * PAGE, [np.array(chosen, dtype=np.int64)], accepted=count * PAGE)
        segment.tokens = request.prompt[: segment.count]
        op.segments.append(segment)
        self._opens(op, request, 0)
        for page in chosen[: -1 if op.status == "aborted" else None]:
            op.steps.append(lambda page=page: self.pool.write(FULL, self.pool.slots_of(FULL, [page]), op.number))
        for _ in range(self._rng.randrange(20)):
            op.steps.append(lambda: None)
        self.load = op
        if not self.features.direct_ends:
            self.ops.end_after(op.number, [op], op.status, lambda: self._final_of_load(op), 0)

    def _final_of_load(self, op: Op) -> Final:
        """A load says nothing of other rows: its end may overtake theirs."""
        final = Final()
        if op.status == "aborted":
            final.void(FULL, sorted(page for _, page in op.touched))
        else:
            for opening in op.openings:
                self._tell_opening(final, opening, failed=False)
            segment = op.segments[0]
            positions = np.arange(segment.count)
            slots = self.pool.slots_of(FULL, segment.pages[FULL].tolist())
            final.write(FULL, [segment.request.name], [segment.count], positions, segment.tokens, slots)
            self.told.wrote(segment)
        op.ended = True
        del self._unended[op.number]
        return final

    def _finish_load(self, op: Op) -> None:
        if self.features.direct_ends and not op.ended:
            self.ops.end(op.number, op.status, self._final_of_load(op), 0)
        if not op.ended:
            return
        self.load = None
        request = op.segments[0].request
        self.slot_writes += op.segments[0].count
        if op.status == "aborted":
            for page in request.pages[FULL]:
                self.pages.release(page)
            self._enqueue(request.prompt, request.target, request.hidden)
            return
        request.gpu_length = request.done = request.scheduled = op.segments[0].count
        self.running.append(request)

    def _snapshot(self) -> SnapshotState:
        return self.told.snapshot(sorted(self.pages.key_of))

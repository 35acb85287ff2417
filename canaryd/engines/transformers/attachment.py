"""Attaching a client to transformers' continuous batching: instance methods are wrapped, the package is not touched.

One op spans one forward step: it begins before anything of the step can reach the pool (restores are copied while the
batch is prepared) and ends behind the forward. Copies of forked requests, which the engine launches while it handles
the outputs, are an op of their own. In asynchronous mode the two overlap as the engine's stream orders them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from canaryd.client.client import Client
from canaryd.client.facts import Final, SnapshotState, Status
from canaryd.client.memory import ExportedMemory, export_cuda_tensor, export_host_tensor
from canaryd.client.ops import Event, FinalSource
from canaryd.engines.transformers.eviction import Eviction
from canaryd.engines.transformers.geometry import UnknownEngine, groups_of
from canaryd.engines.transformers.rows import Rows
from canaryd.engines.transformers.steps import Batch, Step, StepReader
from canaryd.errors import CanarydError
from canaryd.wire.messages import Finding, GroupSpec, Identity

logger = logging.getLogger("canaryd.engines.transformers")

OLDEST_VERSION = (5, 18)

OnFinding = Literal["report", "evict"]


class EngineClient(Protocol):
    """What the adapter needs of a client."""

    def start(self) -> None: ...  # noqa: D102 - as canaryd.client.client.Client
    def begin(self) -> int: ...  # noqa: D102
    def end(self, op: int, status: Status = "done", final: Final | None = None) -> None: ...  # noqa: D102
    def end_after(  # noqa: D102
        self, op: int, events: Sequence[Event], final: FinalSource = None, status: Status = "done"
    ) -> None: ...
    def open_ops(self) -> frozenset[int]: ...  # noqa: D102
    def poll_findings(self) -> list[Finding]: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102


class Connect(Protocol):
    """Makes a client for a pool."""

    def __call__(
        self,
        *,
        identity: Identity,
        engine_version: str,
        model: str,
        groups: Sequence[GroupSpec],
        memory: Sequence[ExportedMemory],
        snapshot: Callable[[], SnapshotState],
    ) -> EngineClient:
        """A client that is not started yet. May raise CanarydError."""
        ...


def attach(
    engine: Any,
    *,
    socket_dir: str | os.PathLike[str],
    name: str = "transformers",
    scheme: Literal["native", "sglang"] | None = None,
    on_finding: OnFinding = "report",
) -> Attachment:
    """Attach canaryd to a `ContinuousBatchingManager` or a `ContinuousBatchProcessor`.

    Returns at once; the pool is exported on the engine's own thread before its next step. A daemon need not run yet.
    What the adapter does not know, it leaves alone: one sentence in the log, no exception.

    Args:
        engine: manager or processor; a manager may be started before or after this call.
        socket_dir: directory of the daemon's sockets.
        name: the engine's name in metrics and findings.
        scheme: fingerprint, None for the daemon's default.
        on_finding: "report" leaves the engine alone; "evict" fails the requests that read damaged bytes and takes the
            blocks out of the prefix cache before the next step.
    """

    def connect(*, identity: Identity, memory: Sequence[ExportedMemory], **description: Any) -> EngineClient:
        return Client(
            socket_dir=socket_dir,
            identity=Identity(engine=name, dp=identity.dp, tp=identity.tp),
            engine_kind="transformers",
            memory=memory,
            frees=True,
            tiers="none",
            scheme=scheme,
            **description,
        )

    return Attachment(engine, connect, on_finding)


class Attachment:
    """Follows the engine from one batch processor to the next. `close` leaves the engine as it was."""

    def __init__(self, engine: Any, connect: Connect, on_finding: OnFinding = "report") -> None:
        self._connect = connect
        self._on_finding = on_finding
        self._wraps = Wraps()
        self._tap: Tap | None = None
        version = _version()
        if version is None or version[:2] < OLDEST_VERSION:
            logger.warning("canaryd leaves this engine alone: it needs transformers 5.18 or later")
        elif hasattr(engine, "prepare_next_batch"):
            self._tap = Tap(engine, connect, on_finding)
        elif hasattr(engine, "_create_batch_processor") and hasattr(engine, "stop"):
            self._follow_manager(engine)
        else:
            logger.warning("canaryd leaves this engine alone: %s is no continuous batching", type(engine).__name__)

    def _follow_manager(self, manager: Any) -> None:
        processor = getattr(manager, "batch_processor", None)
        if processor is not None:
            self._tap = Tap(processor, self._connect, self._on_finding)

        def create(original: Callable[[], Any]) -> Any:
            processor = original()
            if self._tap is None or self._tap.processor is not processor:
                self._leave()
                self._tap = Tap(processor, self._connect, self._on_finding)
            return processor

        def stop(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            tap = self._tap  # keeps the pool alive until the daemon was told that it goes
            original(*args, **kwargs)
            if tap is not None and getattr(manager, "batch_processor", None) is not tap.processor:
                self._leave()

        self._wraps.add(manager, "_create_batch_processor", create)
        self._wraps.add(manager, "stop", stop)

    def _leave(self) -> None:
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.close()

    @property
    def client(self) -> EngineClient | None:
        """The client of the current batch processor; None before its first step, and if it is left alone."""
        return self._tap.client if self._tap is not None else None

    @property
    def eviction(self) -> Eviction | None:
        """What was evicted from the current batch processor; None where findings are only reported."""
        return self._tap.eviction if self._tap is not None else None

    def close(self) -> None:
        """Detach: the daemon lets go of the pool, the engine's methods are its own again. May be called twice."""
        self._wraps.undo()
        self._leave()


class Wraps:
    """Methods replaced on instances, and how to put them back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []

    def add(self, holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace `holder.name` by `wrapper`, which gets the original as its first argument."""
        mine = functools.partial(wrapper, getattr(holder, name))
        self._undo.append((holder, name, vars(holder).get(name), mine))
        setattr(holder, name, mine)

    def undo(self) -> None:
        """Put back what was there. What somebody else wrapped since stays as it is."""
        while self._undo:
            holder, name, before, mine = self._undo.pop()
            if vars(holder).get(name) is not mine:
                continue
            if before is None:
                delattr(holder, name)
            else:
                setattr(holder, name, before)


class Tap:
    """One batch processor under observation. Everything but `close` runs on the engine's thread.

    Whatever fails in here ends the observation and never the engine: the op that was begun stays open for ever, so
    that the daemon judges nothing that it was not told of, and the session is closed.
    """

    def __init__(self, processor: Any, connect: Connect, on_finding: OnFinding) -> None:
        self.processor = processor
        self.client: EngineClient | None = None
        self.eviction: Eviction | None = None
        self._on_finding = on_finding
        self._connect = connect
        self._wraps = Wraps()
        self._closed = False
        self._op = 0
        self._prepared: Sequence[Any] = ()
        self._final = Final()
        self._step: Step | None = None
        self._batch = Batch.of([], [])
        self._counts: list[int] = []
        self._rows: Rows
        self._reader: StepReader
        try:
            self._groups = groups_of(processor)
        except UnknownEngine as unknown:
            self._closed = True
            logger.warning("%s", unknown)
            return
        except Exception as error:  # noqa: BLE001 - the engine is not ours to fail
            self._give_up("looking at the engine", error)
            return
        self._wraps.add(processor, "prepare_next_batch", self._prepare_next_batch)

    # --- coming and going -------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Export the pool between two steps, on the thread that writes it."""
        processor = self.processor
        cache = processor.cache
        self._reader = StepReader(self._groups, processor.inputs_and_outputs)
        self._reader.synchronize()  # a step that was launched before us must not write behind our back
        tensor = cache.cache_tensor
        memory = export_cuda_tensor(tensor) if tensor.is_cuda else export_host_tensor(tensor)
        self._rows = Rows(self._groups, processor.scheduler)
        if self._on_finding == "evict":
            try:
                self.eviction = Eviction(processor, self._groups)
            except UnknownEngine as unknown:
                logger.warning("%s", unknown)
        distributed = getattr(processor, "distributed_helper", None)
        self.client = self._connect(
            identity=Identity(
                engine="",
                dp=getattr(distributed, "dp_rank", 0),
                tp=getattr(distributed, "tp_local_rank", 0),
            ),
            engine_version=_transformers_version(),
            model=str(getattr(processor.config, "model_type", "")),
            groups=[group.spec() for group in self._groups],
            memory=[memory],
            snapshot=self._snapshot,
        )
        self._wrap_engine()
        self.client.start()

    def _wrap_engine(self) -> None:
        processor, rows, add = self.processor, self._rows, self._wraps.add
        add(processor, "_update_tp_group_state", self._update_tp_group_state)
        add(processor, "_generation_step", self._generation_step)
        add(processor, "update_batch", self._update_batch)
        add(processor, "warmup", self._warmup)
        add(processor.model_runner, "compute_batch", self._compute_batch)
        add(processor.cache, "reset", _after(lambda _result: rows.note_reset()))

        def restore(original: Callable[..., Any], batch: Sequence[Any]) -> None:
            restored = [future.state.request_id for future in batch if future.state.is_cpu_offloaded]
            original(batch)
            for request_id in restored:
                rows.note_restored(request_id)

        add(processor.offloading_manager, "restore_scheduled_requests", restore)

        def free_pages(original: Callable[..., Any], group: int, pages: list[int]) -> None:
            original(group, pages)
            rows.note_pages_freed(group, pages)

        add(processor.cache.pool, "free_blocks", free_pages)
        for group in self._groups:
            self._wrap_allocator(group.number, group.allocator)

    def _wrap_allocator(self, group: int, allocator: Any) -> None:
        rows, add = self._rows, self._wraps.add

        def free(original: Callable[..., Any], request_id: str, *args: Any, **kwargs: Any) -> None:
            rows.note_row_freed(request_id)
            original(request_id, *args, **kwargs)

        def acquire(original: Callable[..., Any], request_id: str, *args: Any, **kwargs: Any) -> None:
            original(request_id, *args, **kwargs)
            rows.note_touched(request_id)

        def complete(original: Callable[..., Any], request_id: str, *args: Any, **kwargs: Any) -> None:
            original(request_id, *args, **kwargs)
            rows.note_touched(request_id)

        def fork(original: Callable[..., Any], source: str, child: str, length: int) -> tuple[list[int], list[int]]:
            sources, destinations = original(source, child, length)
            rows.note_fork(group, child, sources, destinations, length)
            return sources, destinations

        add(allocator, "free_blocks", free)
        add(allocator, "acquire_prefix_blocks", acquire)
        add(allocator, "mark_complete_blocks", complete)
        add(allocator, "fork_blocks", fork)

    def close(self) -> None:
        """Stop observing. Before the daemon's hold on the pool is given up, an op begins that never ends: whatever
        the memory is used for next, nothing of it is judged."""
        self._wraps.undo()
        if self._closed:
            return
        self._closed = True
        if self.client is not None:
            self.client.begin()
            self.client.close()

    def _give_up(self, doing: str, error: Exception) -> None:
        logger.error("canaryd leaves this engine alone from now on: error while %s", doing, exc_info=error)
        self.close()

    def _snapshot(self) -> SnapshotState:
        return self._rows.snapshot(self.client.open_ops() if self.client is not None else ())

    # --- the engine's loop ------------------------------------------------------------------------------------------

    def _prepare_next_batch(self, original: Callable[[], bool]) -> bool:
        if self.client is None and not self._closed:
            try:
                self._set_up()
            except CanarydError as refused:
                logger.warning("canaryd leaves this engine alone: %s", refused)
                self.close()
            except Exception as error:  # noqa: BLE001 - the engine goes on without us
                self._give_up("attaching", error)
        if self._closed:
            return original()
        self._op, self._prepared, self._step = 0, (), None
        self._act_on_findings()
        try:
            ready = original()
        except BaseException:
            self._fail_op()
            raise
        try:
            self._after_prepare(ready)
        except Exception as error:  # noqa: BLE001
            self._give_up("reading the batch", error)
        return ready

    def _act_on_findings(self) -> None:
        if self.eviction is None or self.client is None:
            return
        try:
            self.eviction.evict(self.client.poll_findings())
        except Exception as error:  # noqa: BLE001
            self._give_up("evicting", error)

    def _update_tp_group_state(self, original: Callable[[], bool]) -> bool:
        """The engine may sleep in here while others hold it paused; the op begins behind it, before any write."""
        stopping = original()
        if not self._closed and self.client is not None:
            self._op = self.client.begin()
        return stopping

    def _after_prepare(self, ready: bool) -> None:
        if self._closed or self.client is None:
            return
        self._prepared = self._reader.batch() if ready else ()
        self._final, rows = self._rows.collect(self._prepared)
        if not ready:
            self._end(self._op, self._final)
            return
        counts = [future.query_length for future in self._prepared]
        if rows is not self._batch.rows or counts != self._counts:
            self._batch, self._counts = Batch.of(rows, counts), counts
        self._rows.remember_step(self._op, rows, counts)

    def _compute_batch(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if self._closed or not self._prepared:
            return
        try:
            self._step = self._reader.read(self._batch)
        except Exception as error:  # noqa: BLE001
            self._give_up("reading the step's inputs", error)

    def _generation_step(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except BaseException:
            self._fail_op()
            raise
        if self._closed or self.client is None:
            return
        try:
            self._end_step()
        except Exception as error:  # noqa: BLE001
            self._give_up("announcing a step", error)

    def _end_step(self) -> None:
        final, step = self._final, self._step
        self._prepared, self._step = (), None
        if step is None:
            raise RuntimeError("a step was launched that was not seen")
        self._end(self._op, final, step)

    def _end(self, op: int, final: Final, step: Step | None = None, status: Status = "done") -> None:
        """End an op behind everything that is queued on the engine's stream by now."""
        if self.client is None:
            return
        event = self._reader.event()

        def complete() -> Final:
            if step is not None:
                step.add_to(final)
            return final

        if event is None:
            self.client.end(op, status, complete())
        else:
            self.client.end_after(op, [event], complete, status)

    def _update_batch(self, original: Callable[[], None]) -> None:
        """Outputs are handled: only copies for forked requests write the pool here; other changes can wait."""
        if self._closed or self.client is None or not self.processor.scheduler._requests_to_fork:
            original()
            return
        op = self.client.begin()
        status: Status = "failed"
        try:
            original()
            status = "done"
        finally:
            try:
                final, _ = self._rows.collect()
                self._end(op, final, status=status)
            except Exception as error:  # noqa: BLE001
                self._give_up("announcing forked requests", error)

    def _warmup(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Dummy batches write anywhere, and the cache is reset behind them."""
        if self._closed or self.client is None:
            original(*args, **kwargs)
            return
        op = self.client.begin()
        try:
            original(*args, **kwargs)
        finally:
            try:
                final, _ = self._rows.collect()
                self._rows.void_everything(final)
                self._end(op, final)
            except Exception as error:  # noqa: BLE001
                self._give_up("announcing a warm-up", error)

    def _fail_op(self) -> None:
        """The engine raised inside an op: what it may have written is unknown."""
        if self._closed or self.client is None or not self._op:
            return
        try:
            if self._prepared:
                final = self._final
            else:
                final, _ = self._rows.collect()
            self._rows.void_unfinished(final, self._prepared)
            self._prepared = ()
            self._end(self._op, final, status="failed")
        except Exception as error:  # noqa: BLE001
            self._give_up("announcing a failed step", error)


def _after(note: Callable[[Any], None]) -> Callable[..., Any]:
    """A wrapper that runs `note` with the result of the original."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result)
        return result

    return wrapper


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)


def _version() -> tuple[int, ...] | None:
    """Major and minor version of transformers; None if it has none that reads as numbers."""
    parts = _transformers_version().split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else None

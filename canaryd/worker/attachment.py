"""One attached pool: its mapping, its backend, its core, and the loop between them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import msgspec
from canary_kernels import KernelArgumentError

from canaryd.backend.pool_backend import make_backend
from canaryd.control.messages import HOST, WorkerSettings
from canaryd.errors import AttachRefused, BackendError, RefusalReason, WireError
from canaryd.pool.mapping import map_memories
from canaryd.pool.regions import build_layouts, described_ratio
from canaryd.watch.burst import Burst
from canaryd.watch.counters import Check
from canaryd.watch.findings import Finding, Kind
from canaryd.watch.policy import Policy
from canaryd.watch.watch import Watch
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.messages import Attach, Beat, Begin, End, Snapshot
from canaryd.worker.pace import Pace, engine_loss
from canaryd.worker.reports import finding_detail

TAIL_GAP_SECONDS = 1.0
CLIENT_COST_SECONDS = 1.0
"""Span over which the client's cost is averaged."""
_IDLE_SECONDS = 0.005
"""A second read that is due and cannot be planned yet is asked for again after this, not at once."""
_MIN_STAMPS = 256
_MAX_STAMPS = 65536
_LOCATED_PER_BURST = 8
_MAX_FLIPPED_BITS = 8
"""One word that differs in more bits was overwritten rather than hit."""


class Attachment:
    """Maps on construction. Raises AttachRefused; nothing stays mapped then.

    Args:
        attach: the validated attach message.
        fds: the side connection's descriptors, the announce page first; they stay the caller's.
        settings: the worker's settings.
        count_launches: called with the launches by kernel of each burst.
        before_compiling: called before kernels may be compiled.
    """

    def __init__(
        self,
        attach: Attach,
        fds: Sequence[int],
        settings: WorkerSettings,
        count_launches: Callable[[dict[str, int]], None],
        before_compiling: Callable[[], None],
    ) -> None:
        self._attach = attach
        self._count_launches = count_launches
        self._on_host = settings.device == HOST
        self._groups = {group.name: number for number, group in enumerate(attach.groups)}
        self.scheme: Literal["native", "sglang"] = attach.scheme or settings.scheme
        self.described_ratio = described_ratio(attach)
        self.busy_seconds = 0.0
        self.report_at = 0.0
        self._page = _announce_page(fds)
        self._pool = map_memories(
            attach.memories, fds, device_uuid=None if settings.device == HOST else settings.device
        )
        try:
            layouts = build_layouts(attach, self._pool.tensors, scheme=self.scheme)
            slot_bytes = [layout.slot_bytes for layout in layouts]
            self.slots = sum(layout.num_slots for layout in layouts)
            self.size = sum(memory.size for memory in attach.memories)
            key = secrets.randbits(64)
            if settings.device != HOST or settings.backend == "triton":
                before_compiling()
            self._backend = make_backend(layouts, scheme=self.scheme, key=key, backend=settings.backend)
            del layouts
            self.watch = Watch(
                attach,
                policy=_policy(settings, max(slot_bytes)),
                scheme=self.scheme,
                chain_key=key,
                slot_bytes=slot_bytes,
            )
        except KernelArgumentError as error:
            self._pool.close()
            self._page.close()
            raise AttachRefused(
                RefusalReason.SCHEME,
                f"The scheme {self.scheme} cannot read this layout: {error}.",
                "Choose the scheme native.",
            ) from error
        except BackendError as error:
            self._pool.close()
            self._page.close()
            raise AttachRefused(
                RefusalReason.LIMIT,
                f"The device state for {self.slots} slots could not be allocated: {error}.",
                "Leave the daemon some memory on this device.",
            ) from error
        except BaseException:
            self._pool.close()
            self._page.close()
            raise
        self._pace = Pace(tick=settings.tick, share=settings.busy_share)
        self._running: tuple[Burst, float] | None = None
        self._not_before = 0.0
        self.client_seconds = 0.0
        self._client_noted: tuple[float, float] | None = None
        self._beat_seq = 0
        self._applied_seq = 0
        self._behind_since: float | None = None

    # --- the stream -------------------------------------------------------------------------------------------------

    def apply(self, seq: int, message: Begin | End | Snapshot | Beat, now: float) -> None:
        """One accepted frame."""
        if isinstance(message, Beat):
            self._beat_seq = seq
            self._note_client_cost(message.engine_ns / 1e9, now)
            if seq > self._applied_seq and self._behind_since is None:
                self._behind_since = now
            return
        self._applied_seq = seq
        self._behind_since = None
        self.watch.apply(seq, message, now)

    def _note_client_cost(self, seconds: float, now: float) -> None:
        """The client's time on the engine's threads, `seconds` in its whole life, counts in the engine's budget. A host
        pool's budget is of a core, not of the engine."""
        if self._client_noted is None:
            self._client_noted = seconds, now
        before, noted_at = self._client_noted
        spent, since = max(0.0, seconds - before), now - noted_at
        if since < CLIENT_COST_SECONDS:
            return
        if not self._on_host:
            self._pace.client_takes(spent / since)
        self.client_seconds += spent
        self._client_noted = seconds, now

    def _look_for_a_lost_tail(self, now: float) -> None:
        """A message that was lost with none behind it leaves no hole in the numbers: beats go on naming its number, and
        nothing comes."""
        if self._behind_since is not None and now - self._behind_since > TAIL_GAP_SECONDS:
            self._behind_since = None
            self._applied_seq = self._beat_seq
            self.watch.on_gap(now)

    # --- bursts -----------------------------------------------------------------------------------------------------

    def next_at(self, now: float) -> float:
        """When `step` should be called again."""
        if self._running is not None:
            return now + 0.001
        due = self.watch.next_due(now)
        return self._pace.next_at if due is None else min(max(due, self._not_before), self._pace.next_at)

    def step(self, now: float) -> None:
        """Fetch the running burst's result, or start the next burst if it is time.

        Raises BackendError if the device failed; the core knows it then.
        """
        self._look_for_a_lost_tail(now)
        if self._running is None:
            if now < self.next_at(now):
                return
            if now >= self._pace.next_at:
                self._pace.ticked(now)
            burst = self.watch.next_burst(now)
            if burst is None:
                self._not_before = now + _IDLE_SECONDS
                return
            self._running = burst, now
            self._on_device(lambda: self._backend.start(burst), now)

    def fetch(self, clock: Callable[[], float]) -> None:
        """Judge the running burst if its device work is complete. Raises BackendError as `step`."""
        if self._running is None:
            return
        result = self._on_device(self._backend.poll, clock())
        if result is None:
            return
        # Only now: whatever had been announced when the last read was made must be applied before it is judged.
        announced = self._page.read()
        _burst, started = self._running
        self._running = None
        self._count_launches(result.launches)
        self.watch.on_burst_done(result, announced, clock())
        # On the host everything competes with the engine for cores, the planning and judging too.
        busy = clock() - started if self._on_host else result.busy_seconds
        self.busy_seconds += busy
        if self._on_host:
            self._pace.spent(started, busy)
        else:
            launches = sum(result.launches.values())
            self._pace.spent(started, engine_loss(launches=launches, bytes_read=result.bytes_read, busy=busy))

    def _on_device(self, call: Callable[[], Any], now: float) -> Any:
        try:
            return call()
        except BackendError:
            self._running = None
            self.watch.on_burst_lost(now)
            raise

    # --- questions --------------------------------------------------------------------------------------------------

    def take_findings(self, unix: Callable[[float], float]) -> list[tuple[str, dict[str, Any]]]:
        """Findings since the last call, as (check, JSON values)."""
        return [
            (finding.check.value, finding_detail(finding, unix) | self._location(number, finding))
            for number, finding in enumerate(self.watch.take_findings())
        ]

    def _location(self, number: int, finding: Finding) -> dict[str, Any]:
        """The changed word of a content finding, where one word explains the difference, else whose content it is. No
        values: a finding holds no content of the cache."""
        located = finding.check in {Check.CONTENT, Check.COPY}
        if not located or number >= _LOCATED_PER_BURST or self._running is not None:
            return {}
        group = self._groups[finding.group]
        slot = finding.slots[0][0]
        change = self._backend.locate(group, slot, stored_digest=finding.stored_digest, stored_sum=finding.stored_sum)
        if change is None:
            return self._origin(group, finding)
        bits = change.changed_bits
        return {
            "classification": (Kind.BIT_FLIP if bits.bit_count() <= _MAX_FLIPPED_BITS else Kind.WORD).value,
            "region": self._attach.groups[group].regions[change.region].name,
            "byte_offset": change.byte_offset,
            "changed_bits": f"{bits:#018x}",
            "changed_bit_count": bits.bit_count(),
        }

    def _origin(self, group: int, finding: Finding) -> dict[str, Any]:
        """Content that was stamped before: for another slot, or for this one."""
        if finding.classification == Kind.ZEROED:
            return {}
        slot = finding.slots[0][0]
        if self._backend.slot_record(group, slot).prev_digest == finding.seen_digest:
            return {"classification": Kind.STALE.value}
        others = self._backend.stamped_with(group, finding.seen_digest, finding.seen_sum)
        others = [other for other in others if other != slot]
        return {"classification": Kind.MISDIRECTED.value, "content_of_slot": others[0]} if others else {}

    def explain(self, group: str, slot: int, now: float) -> Any:
        """What the core knows of one slot. Raises ValueError naming what does not exist."""
        if group not in self._groups:
            raise ValueError(f"no group {group!r}; groups: {', '.join(map(repr, self._groups))}")
        return self.watch.explain(self._groups[group], slot, now)

    def close(self) -> None:
        """Wait for work in flight and close every mapping."""
        try:
            self._backend.close()
        finally:
            del self._backend
            self._pool.close()
            self._page.close()


def _announce_page(fds: Sequence[int]) -> AnnouncePage:
    try:
        if not fds:
            raise AttachRefused(
                RefusalReason.HANDLE_INVALID, "The side connection carried no announce page.", "Use a matching client."
            )
        return AnnouncePage.from_fd(fds[0])
    except WireError as error:
        raise AttachRefused(RefusalReason.HANDLE_INVALID, f"{error}.", "Use a matching client.") from error


def _policy(settings: WorkerSettings, slot_bytes: int) -> Policy:
    """Stamps are bounded by bytes too, so that one burst never keeps the loop for long."""
    return Policy(
        tick_seconds=settings.tick,
        max_age_live=settings.max_age_live,
        max_age_idle=settings.max_age_idle,
        bytes_per_burst=settings.bytes_per_burst,
        max_stamps_per_burst=min(_MAX_STAMPS, max(_MIN_STAMPS, settings.bytes_per_burst // slot_bytes)),
    )


StreamFrame = Begin | End | Snapshot | Beat


def stream_decoder() -> msgspec.msgpack.Decoder[StreamFrame]:
    """Decodes bodies that the supervisor has validated."""
    # typing: a union is a valid decoder type at run time, but not a `type[T]` for mypy
    return cast("msgspec.msgpack.Decoder[StreamFrame]", msgspec.msgpack.Decoder(StreamFrame))

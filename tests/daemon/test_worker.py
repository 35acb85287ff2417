"""The worker's main loop, run turn by turn in this process, with the supervisor's end of the channel in our hands."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from canary_kernels import (
    CanaryLaunchTag,
    KernelArgumentError,
    RealKvHashMode,
    VerifyOrWriteContext,
    WritePlan,
    launch_canary_write_kernel,
)

import canaryd.worker.worker as worker_module
from canaryd.control import messages as control
from canaryd.control.channel import Channel
from canaryd.control.messages import (
    HOST,
    Detach,
    Explain,
    Explained,
    Frame,
    FromWorker,
    Map,
    Mapped,
    NeedSnapshot,
    NotMapped,
    Ping,
    Pong,
    Ready,
    Report,
    Stop,
    Unmapped,
    WorkerReport,
    WorkerSettings,
)
from canaryd.errors import AttachRefused, BackendError, RefusalReason
from canaryd.wire.announce import AnnouncePage
from canaryd.wire.messages import Attach, Begin, GroupSpec, HostShmMemory, Identity, RegionSpec, Snapshot
from canaryd.worker.worker import DeviceLost, Worker

SESSION = bytes(range(16))
FAILURES = "canaryd_kernel_failures_total"


class Bench:
    """A prepared worker and everything that it said."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel = Channel(mine, limit_bytes=1 << 22)
        settings = WorkerSettings(
            device=HOST,
            backend=None,
            scheme="native",
            nice=0,
            tick=0.01,
            busy_share=1.0,
            max_age_live=1.0,
            max_age_idle=1.0,
            bytes_per_burst=1 << 20,
            selftest_interval=60.0,
            log_format="text",
            log_level="info",
        )
        self.worker = Worker(settings, Channel(theirs, limit_bytes=1 << 22))
        self.said: list[FromWorker] = []
        self.pool = os.memfd_create("worker-bench")
        os.ftruncate(self.pool, 64)
        self.page = AnnouncePage.create()
        self.worker._prepare()

    def tell(self, message: control.ToWorker, *fds: int) -> None:
        self.channel.send(control.encode(message), fds)

    def map(self, size: int = 64) -> None:
        region = RegionSpec(name="r", memory=0, offset=0, page_stride=16, slot_stride=16, piece_bytes=16)
        attach = Attach(
            identity=Identity(engine="e"),
            engine_kind="test",
            engine_version="1",
            client_version="1",
            memories=[HostShmMemory(fd_index=1, offset=0, size=size)],
            groups=[GroupSpec(name="g", num_pages=4, page_size=1, regions=[region])],
            scheme="sglang",
        )
        body = msgspec.msgpack.encode(attach)
        self.tell(Map(session=SESSION, engine="e", body=body), self.page.fd, self.pool)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """Turn until the worker has said something that fits; later calls look from there on."""
        deadline = time.monotonic() + 20
        while True:
            while self.said:
                message = self.said.pop(0)
                if wanted(message):
                    return message
            assert time.monotonic() < deadline, "it was never said"
            self.worker._turn()
            self.said += [control.decode_from_worker(body) for body, _fds in self.channel.receive()]
            time.sleep(0.001)

    def close(self) -> None:
        self.channel.close()
        os.close(self.pool)
        self.page.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()
    assert made.worker.run() == 0  # the channel is closed: it lets go of everything and ends


def of(kind: type) -> Callable[[Any], bool]:
    return lambda message: isinstance(message, kind)


def value(report: Any, name: str, *labels: str) -> float:
    return next((each.value for each in report.counters if (each.name, each.labels) == (name, labels)), 0.0)


def test_it_is_ready_after_its_self_test(bench: Bench) -> None:
    assert bench.until(of(Ready)).backend == "reference"
    report = bench.until(of(WorkerReport))
    assert (value(report, "canaryd_selftest_runs_total"), value(report, "canaryd_selftest_failures_total")) == (1, 0)
    assert [each.name for each in report.gauges] == ["canaryd_selftest_last_success_timestamp_seconds"]
    assert value(report, "canaryd_selftest_kernel_launches_total", "digest") > 0
    assert value(report, "canaryd_kernel_launches_total", "digest") == 0
    assert report.rss_bytes > 1 << 20


def test_pings_are_answered_in_order(bench: Bench) -> None:
    for number in (1, 2, 3):
        bench.tell(Ping(number=number))
    assert [bench.until(of(Pong)).number for _ in range(3)] == [1, 2, 3]


def test_an_attachment_from_map_to_detach(bench: Bench) -> None:
    bench.map()
    mapped = bench.until(of(Mapped))
    assert (mapped.scheme, mapped.slots, mapped.size, mapped.described_ratio) == ("sglang", 4, 64, 1.0)
    # The self-test proves the scheme of this attachment from now on.
    bench.until(lambda each: isinstance(each, WorkerReport) and value(each, "canaryd_selftest_runs_total") == 2)
    snapshot = msgspec.msgpack.encode(Snapshot(open_ops=[], rows=[], cached=[]))
    bench.tell(Frame(session=SESSION, seq=1, body=snapshot))
    bench.tell(Frame(session=SESSION, seq=5, body=msgspec.msgpack.encode(Begin(op=1))))
    assert bench.until(of(NeedSnapshot)).session == SESSION
    report = bench.until(lambda each: isinstance(each, Report) and value(each, "canaryd_engine_message_gaps_total") > 0)
    assert {each.name for each in report.distributions} == {"canaryd_stamp_lag_seconds", "canaryd_unguarded_seconds"}
    bench.tell(Explain(request=1, session=SESSION, group="g", slot=3))
    bench.tell(Explain(request=2, session=SESSION, group="g", slot=4))
    bench.tell(Explain(request=3, session=bytes(16), group="g", slot=0))
    answers = [bench.until(of(Explained)) for _ in range(3)]
    assert [each.request for each in answers] == [1, 2, 3]
    assert answers[0].document["slot"] == 3
    assert all(each.document is None and each.error for each in answers[1:])
    bench.tell(Detach(session=SESSION, cause="test"))
    bench.until(of(Unmapped))
    bench.tell(Frame(session=SESSION, seq=6, body=msgspec.msgpack.encode(Begin(op=2))))  # late, and ignored
    bench.tell(Ping(number=9))
    bench.until(of(Pong))


def test_a_pool_that_cannot_be_mapped_is_refused_and_the_worker_lives(bench: Bench) -> None:
    bench.map(size=128)
    refused = bench.until(of(NotMapped)).refused
    assert refused.reason == "memory_size"
    assert refused.cause
    assert refused.remedy
    bench.map()
    bench.until(of(Mapped))


def test_a_refused_launch_is_counted_with_its_labels(bench: Bench) -> None:
    plan = WritePlan(
        write_offsets=torch.zeros(4, dtype=torch.int64),  # of a capacity of 4: one too short
        write_seed_slot_indices=torch.zeros(4, dtype=torch.int64),
        write_num_valid_reqs=torch.zeros(1, dtype=torch.int32),
    )
    context = VerifyOrWriteContext(
        canary_buf=torch.zeros((4, 32), dtype=torch.uint8),
        kernel_kind=CanaryLaunchTag.SWEEP_K_FULL,
        violation_ring=torch.zeros((4, 8), dtype=torch.int64),
        violation_write_index=torch.zeros(1, dtype=torch.int32),
        slot_run_counter=torch.zeros(1, dtype=torch.int64),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64),
        real_kv_sources=(),
        real_kv_hash_mode=RealKvHashMode.NONE,
        enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
    )
    empty = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(KernelArgumentError, match="write_offsets") as caught:
        launch_canary_write_kernel(
            context=context,
            plan=plan,
            input_ids=empty,
            positions=empty,
            out_cache_loc=empty,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )
    labels = (caught.value.kernel, "write_offsets", caught.value.check)
    name = "canaryd_kernel_argument_validation_failures_total"
    bench.until(lambda each: isinstance(each, WorkerReport) and value(each, name, *labels) == 1)


def test_a_device_that_keeps_failing_ends_the_worker(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.map()
    bench.until(of(Mapped))
    attachment = bench.worker._attachments[SESSION]

    def fail_step(_now: float) -> None:
        raise BackendError("test")

    monkeypatch.setattr(attachment, "step", fail_step)
    bench.worker._turn()
    bench.worker._turn()
    with pytest.raises(DeviceLost):
        bench.worker._turn()
    reports = [control.decode_from_worker(body) for body, _fds in bench.channel.receive()]
    last = [each for each in reports if isinstance(each, WorkerReport)][-1]
    assert value(last, FAILURES, "burst") == 3


@pytest.mark.parametrize("answers", [True, False])
def test_a_backend_that_cannot_be_made_is_counted_and_ends_the_worker_if_the_device_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AttachRefused(RefusalReason.LIMIT, "No room.", "Make some.") from BackendError("test")

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "Attachment", refuse)
        patch.setattr(worker_module, "device_answers", lambda: answers)
        patch.setattr(bench.worker, "_settings", msgspec.structs.replace(bench.worker._settings, device="GPU-1"))
        bench.map()
        if answers:
            bench.until(of(NotMapped))
            bench.until(lambda each: isinstance(each, WorkerReport) and value(each, FAILURES, "burst") == 1)
            return
        with pytest.raises(DeviceLost, match="test"):
            bench.worker._turn()
    reports = [control.decode_from_worker(body) for body, _fds in bench.channel.receive()]
    last = [each for each in reports if isinstance(each, WorkerReport)][-1]
    assert value(last, FAILURES, "burst") == 1


def test_stop_ends_it(bench: Bench) -> None:
    bench.tell(Stop())
    assert bench.worker.run() == 0

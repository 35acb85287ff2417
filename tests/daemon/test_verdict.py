"""Hardware or software: each rule of the verdict, and the GPU counters that it is given."""

# ruff: noqa: N802, N815 - the library spells its names so
from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from canaryd.findings.finding import Finding, Hardware, base_name
from canaryd.findings.verdict import judge
from canaryd.supervisor.gpu_counters import GpuCounters
from daemon.harness import wait_for

QUIET = Hardware(time=1.0, ecc=True, corrected=0, uncorrected=0, new_uncorrected=0, remapped_rows=0)


def finding(classification: str = "bit_flip", check: str = "content", **more: Any) -> Finding:
    detail = {"classification": classification}
    return Finding(id="f", engine="e", gpu_uuid="g", check=check, opened=1.0, process="p", detail=detail, **more)


@pytest.mark.parametrize(
    ("case", "ranks", "word", "reason"),
    [
        (finding("page", hardware=Hardware(time=1.0, xids=(31, 94))), (), "hardware likely", "Xid 94"),
        (finding("page", hardware=Hardware(time=1.0, xids=(13, 31))), (), "software likely", "page"),
        (finding("word", hardware=Hardware(time=1.0, new_uncorrected=2)), (), "hardware likely", "2 uncorrectable"),
        (finding("word", hardware=Hardware(time=1.0, remap_failed=True)), (), "hardware likely", "failed"),
        (finding("word", hardware=Hardware(time=1.0, remap_pending=True)), (), "hardware likely", "pending"),
        (finding(), ("e", "e:tp1"), "software likely", "2 ranks"),
        (finding(check="owner"), (), "software likely", "bookkeeping"),
        (finding("zeroed"), (), "software likely", "zeroed"),
        (finding(count=2, hardware=QUIET), (), "hardware likely", "2 times"),
        (finding(hardware=Hardware(time=1.0, ecc=False)), (), "hardware likely", "without ECC"),
        (finding(hardware=QUIET), (), "unknown", "ECC is on"),
        (finding(), (), "unknown", "no error counters"),
        (finding("word", hardware=QUIET), (), "unknown", "Neither"),
    ],
)
def test_verdict(case: Finding, ranks: tuple[str, ...], word: str, reason: str) -> None:
    verdict, why = judge(case, ranks)
    assert verdict == word
    assert reason in why


def test_ranks_have_one_name() -> None:
    assert base_name("a:b:dp1:tp3") == "a:b"
    assert base_name("tp1") == "tp1"


class FakeNvml:
    """Two uncorrectable errors and one Xid come after the first look."""

    class NVMLError(Exception):
        """As the library's."""

    nvmlEventTypeXidCriticalError = 8
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1

    def __init__(self) -> None:
        self.errors = 5
        self.xids = [94]

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: None

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, device: str) -> str:
        return device

    def nvmlDeviceGetEccMode(self, _device: str) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetTotalEccErrors(self, _device: str, kind: int, _counter: int) -> int:
        return self.errors if kind else 0

    def nvmlDeviceGetRemappedRows(self, _device: str) -> list[int]:
        raise self.NVMLError

    def nvmlEventSetWait_v2(self, _events: object, _milliseconds: int) -> object:
        if self.errors == 5 or not self.xids:
            time.sleep(0.01)
            raise self.NVMLError
        return SimpleNamespace(eventData=self.xids.pop(), device="GPU-1")

    def nvmlEventSetCreate(self) -> str:
        return "events"


def test_counters_are_read_beside_the_loop_and_unknown_stays_unknown() -> None:
    nvml = FakeNvml()
    counters = GpuCounters(["GPU-1"], nvml)
    counters.start()
    try:
        counters.ask("GPU-1", 1.0)
        ((uuid, since, first),) = wait_for("the first answer", counters.answers)
        assert (uuid, since, first.ecc, first.new_uncorrected, first.remapped_rows) == ("GPU-1", 1.0, True, 0, None)
        nvml.errors = 7
        wait_for("the Xid", lambda: not nvml.xids)
        time.sleep(0.05)
        counters.ask("GPU-1", 2.0)
        counters.ask("GPU-2", 2.0)  # nobody's
        ((_uuid, _since, second),) = wait_for("the second answer", counters.answers)
        assert (second.new_uncorrected, second.xids) == (2, (94,))
    finally:
        counters.stop()


def test_old_errors_say_nothing_of_a_new_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, now = FakeNvml(), [1000.0]
    counters = GpuCounters(["GPU-1"], nvml)
    monkeypatch.setattr(time, "time", lambda: now[0])
    counters._xids["GPU-1"] = [(1000.0, 94)]
    seen = []
    for moment, errors in ((1000.0, 5), (1100.0, 7), (1700.0, 7), (1701.0, 7), (3000.0, 8)):
        now[0], nvml.errors = moment, errors
        hardware = counters._snapshot("GPU-1", "GPU-1")
        seen.append((hardware.new_uncorrected, hardware.xids))
    assert seen == [(0, (94,)), (2, (94,)), (2, ()), (0, ()), (1, ())]


def test_no_gpu_starts_nothing() -> None:
    counters = GpuCounters([])
    counters.start()
    counters.ask("host", 1.0)
    assert counters.answers() == []

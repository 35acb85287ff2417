"""The self-test passes on sound kernels, and fails as soon as one of them is blind or sees ghosts."""

from __future__ import annotations

import re

import canary_kernels.reference.digest as digest_reference
import pytest
import torch
from canary_kernels import set_launch_observer

import canaryd.backend.reference_backend as backend_module
import canaryd.backend.selftest as selftest_module
from canaryd.backend.selftest import SelfTest, run_and_print

KERNELS = {
    "plan",
    "digest",
    "write",
    "verify",
    "compare",
    "plan_offsets",
    "plan_entries",
    "canary_write",
    "canary_verify",
}


def test_it_passes_and_launches_every_kernel(scheme, place, seed):
    report = SelfTest(device=place[0], backend=place[1], scheme=scheme, seed=seed).run()
    assert report.failures == ()
    assert report.passed
    assert set(report.launches) == KERNELS
    assert report.seconds > 0


def test_many_seeds_pass(scheme):
    for seed in range(25):
        report = SelfTest(device="cpu", scheme=scheme, seed=seed).run()
        assert report.passed, (seed, report.failures)


def failures(scheme="native"):
    return "; ".join(SelfTest(device="cpu", scheme=scheme, seed=5).run().failures)


def test_a_constant_digest_fails(scheme, monkeypatch):
    def constant(_self, _slots, digests, sums, *_rest):
        digests.fill_(7)
        sums.fill_(7)

    monkeypatch.setattr(digest_reference.HostDigest, "__call__", constant)
    assert "flipped bit: saw ([], []), expected" in failures(scheme)


def test_a_random_digest_fails(scheme, monkeypatch):
    def random(_self, slots, digests, sums, *_rest):
        digests.copy_(torch.randint(0, 1 << 60, slots.shape))
        sums.zero_()

    monkeypatch.setattr(digest_reference.HostDigest, "__call__", random)
    assert failures(scheme).startswith("clean pool: saw (")


@pytest.mark.parametrize(
    ("owner", "launcher", "complaint"),
    [
        (backend_module, "launch_compare", r"flipped bit: saw \(\[\], \[\]\)"),
        (backend_module, "launch_links", r"wrong token: saw \(\[\], \[\]\)"),
        (backend_module, "launch_stamp", r"clean pool: saw \(\[0, 1"),
        (
            selftest_module,
            "launch_canary_verify_kernel",
            r"contract launchers, flipped bit: saw \[\], expected \[\[\d+, 4",
        ),
        (selftest_module, "launch_canary_write_kernel", r"contract launchers, clean pool: saw \[\["),
        (selftest_module, "launch_canary_plan_kernels", r"contract launchers, flipped bit: saw \[\]"),
    ],
)
def test_a_kernel_that_does_nothing_fails(owner, launcher, complaint, monkeypatch):
    monkeypatch.setattr(owner, launcher, lambda **_arguments: None)
    assert re.search(complaint, failures())


def test_a_failing_device_is_a_failure_and_not_an_exception(monkeypatch):
    def fail(**_arguments):
        raise error

    error = RuntimeError("CUDA error: unspecified launch failure")
    monkeypatch.setattr(backend_module, "launch_digest", fail)
    report = SelfTest(device="cpu").run()
    assert report.failures == ("the device failed: BackendError: RuntimeError: CUDA error: unspecified launch failure",)
    monkeypatch.undo()
    error = OSError(28, "No space left on device")
    monkeypatch.setattr(selftest_module, "launch_canary_write_kernel", fail)
    report = SelfTest(device="cpu").run()
    assert report.failures == ("the device failed: OSError: [Errno 28] No space left on device",)


def test_an_outer_observer_stays():
    seen = []
    set_launch_observer(seen.append)
    try:
        report = SelfTest(device="cpu").run()
        assert len(seen) == sum(report.launches.values())
        seen.clear()
        SelfTest(device="cpu").run()
        assert seen
    finally:
        set_launch_observer(None)


def test_the_command_prints_a_line_per_scheme(capsys, monkeypatch):
    assert run_and_print("cpu")
    assert re.fullmatch(
        r"self-test native on cpu: passed in [\d.]+ s\nself-test sglang on cpu: passed in [\d.]+ s\n",
        capsys.readouterr().out,
    )
    monkeypatch.setattr(backend_module, "launch_compare", lambda **_arguments: None)
    assert not run_and_print("cpu")
    assert "FAILED" in capsys.readouterr().out

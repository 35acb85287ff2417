"""Notes of stamps: exactly what there is to say, compacted, with the true count."""

from __future__ import annotations

import pytest
import torch
from canary_kernels import NOTE_FIELDS, STAMPED, Findings, KernelArgumentError, launch_notes
from canary_kernels.device import notes as kernels
from native_layouts import poisoned


def empty(width: int, capacity: int, device: str) -> Findings:
    findings = Findings(rows=poisoned(capacity, width, device=device), count=poisoned(1, device=device))
    findings.reset()
    return findings


def stamped(count: int, device: str) -> torch.Tensor:
    records = torch.zeros((count, 8), dtype=torch.int64)
    records[:, 3] = torch.arange(count) * 10
    records[:, 4] = torch.arange(count) * 7
    records[:, 6] = STAMPED
    return records.to(device)


def read(count: int, device: str) -> dict[str, torch.Tensor]:
    """Bytes that differ from all stamps, in reversed order of slots."""
    slots = torch.arange(count, device=device).flip(0)
    zeros = torch.zeros(count, dtype=torch.uint8, device=device)
    return {"slots": slots, "digests": slots * 10 + 1, "sums": slots * 7, "nonfinite": zeros}


def noted(backend: str, records: torch.Tensor, given: dict[str, torch.Tensor], capacity: int = 50) -> tuple:
    out = empty(NOTE_FIELDS, capacity, str(records.device))
    launch_notes(records=records, **given, out=out, backend=backend)
    count = int(out.count)
    return sorted(out.rows[: min(count, capacity)].tolist()), count


def test_what_is_unchanged_or_not_finite_is_noted(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    enqueue = kernels.enqueue_notes
    monkeypatch.setattr(kernels, "enqueue_notes", lambda *a, **k: (launched.append(1), enqueue(*a, **k)))
    records, given = stamped(600, device), read(600, device)
    for item in (0, 255, 256, 300, 599):
        given["digests"][item] -= 1
    records[599 - 300, 6] = 0  # never stamped
    given["sums"][255] += 1
    for item, value in ((256, 1), (7, 255)):
        given["nonfinite"][item] = value
    assert noted(backend, records, given) == ([[0, 1], [7, 2], [256, 3], [599, 1]], 4)
    assert bool(launched) == (backend == "triton")


def test_slots_out_of_range_are_never_read(backend: str, device: str) -> None:
    given = read(4, device)
    given["slots"] = torch.tensor([-1, 600, (1 << 63) - 1, -(1 << 63)], device=device)
    given["nonfinite"][:] = 1
    assert noted(backend, stamped(600, device), given) == ([], 0)


def test_the_count_goes_on_past_the_capacity(backend: str, device: str) -> None:
    given = read(600, device)
    given["digests"] -= 1
    rows, count = noted(backend, stamped(600, device), given, capacity=3)
    assert count == 600
    assert len(rows) == 3
    assert all(bits == 1 for _, bits in rows)


@pytest.mark.parametrize("count", [-5, 0, 3, 1 << 40])
def test_the_count_on_the_device_is_clamped(count: int, device: str) -> None:
    given = read(600, device)
    given["digests"] -= 1
    out = empty(NOTE_FIELDS, 1000, device)
    kernels.enqueue_notes(stamped(600, device), *given.values(), out, count=torch.tensor([count], device=device))
    assert int(out.count) == min(max(count, 0), 600)


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("nonfinite", torch.zeros(3, dtype=torch.uint8), "length"),
        ("nonfinite", torch.zeros(4, dtype=torch.int64), "dtype"),
        ("digests", torch.zeros(3, dtype=torch.int64), "length"),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: torch.Tensor, check: str) -> None:
    with pytest.raises(KernelArgumentError) as caught:
        noted("reference", stamped(4, "cpu"), read(4, "cpu") | {name: value})
    assert (caught.value.argument, caught.value.check) == (name, check)

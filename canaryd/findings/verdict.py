"""Whether the hardware or the software is to blame, as far as the evidence goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from canaryd.findings.finding import Finding, Hardware

Verdict = tuple[Literal["hardware likely", "software likely", "unknown"], str]

FEW_BITS = 8
"""A word that differs in more bits was overwritten rather than hit."""
MEMORY_XIDS = {
    48: "an uncorrectable ECC error",
    63: "a row remapping",
    64: "a failed row remapping",
    79: "that it fell off the bus",
    92: "many corrected ECC errors",
    94: "a contained ECC error",
    95: "an uncontained ECC error",
}
"""Numbers by which the driver says that memory or board failed; others mostly blame programs."""
_WHOLE = ("row", "page", "zeroed", "misdirected", "stale", "nonfinite")
_LEDGER = ("owner", "lifetime", "range", "input", "landed", "copy", "token", "position", "chain")


def judge(finding: Finding, ranks: Iterable[str] = ()) -> Verdict:
    """The verdict and the reason for it, one sentence. `ranks`: engines that report the same incident."""
    reported = _reported(finding.hardware)
    if reported is not None:
        return "hardware likely", reported
    affected = set(ranks) | {finding.engine}
    if len(affected) > 1:
        return "software likely", f"{len(affected)} ranks report it at once, and they share no memory."
    if finding.check in _LEDGER:
        return "software likely", f"The check {finding.check} is about the engine's bookkeeping, not about bits."
    if finding.classification in _WHOLE:
        return (
            "software likely",
            f"Class {finding.classification}: whole pieces change by writes, memory fails in bits.",
        )
    if finding.classification == "bit_flip":
        return _flipped(finding)
    return "unknown", "Neither the damage nor the GPU's counters point to one side."


def _reported(hardware: Hardware | None) -> str | None:
    """What the GPU itself complained of."""
    if hardware is None:
        return None
    for xid in hardware.xids:
        if xid in MEMORY_XIDS:
            return f"The GPU reported {MEMORY_XIDS[xid]} (Xid {xid})."
    if hardware.new_uncorrected:
        return f"The GPU counted {hardware.new_uncorrected} uncorrectable ECC errors lately."
    if hardware.remap_failed or hardware.remap_pending:
        return f"A remapping of the GPU's memory rows {'failed' if hardware.remap_failed else 'is pending'}."
    return None


def _flipped(finding: Finding) -> Verdict:
    hardware = finding.hardware
    if finding.count > 1:
        return "hardware likely", f"Bits flipped {finding.count} times at the same place."
    if hardware is None or hardware.ecc is None:
        return "unknown", "Bits flipped, and the memory has no error counters that could be read."
    if not hardware.ecc:
        return "hardware likely", "Bits flipped in memory without ECC."
    return "unknown", "Bits flipped, but ECC is on and counted nothing: read the driver's log, repeat on another GPU."

"""Digest and sum over all regions of a group, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from canary_kernels.checks import check_table, check_vectors
from canary_kernels.launches import Backend, device_guard, record_launch, resolve_backend
from canary_kernels.layout import GroupLayout
from canary_kernels.reference.digest import HostDigest
from canary_kernels.scheme import Scheme
from canary_kernels.validation import fail, require_contiguous, require_device, require_dtype, require_length

if TYPE_CHECKING:
    from canary_kernels.device.digest import DeviceDigest


@dataclass
class DigestTable:
    """What digests of one group need beside the slots (addresses, keys, scratch); made once per layout.

    Raises:
        KernelArgumentError: the scheme cannot read this layout.
    """

    layout: GroupLayout
    scheme: Scheme = "native"
    _host: HostDigest | None = field(default=None, init=False, repr=False)
    _device: DeviceDigest | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.scheme == "sglang":
            for number, region in enumerate(self.layout.regions):
                if region.slot_bytes % 16:
                    fail(
                        "digest",
                        "layout",
                        "alignment",
                        f"layout regions[{number}] must hold a multiple of 16 bytes per slot in scheme sglang, "
                        f"got {region.slot_bytes}",
                    )

    def host(self) -> HostDigest:
        """The torch implementation."""
        if self._host is None:
            self._host = HostDigest(self.layout)
        return self._host

    def device(self) -> DeviceDigest:
        """The Triton implementation; imports Triton."""
        if self._device is None:
            from canary_kernels.device.digest import DeviceDigest

            self._device = DeviceDigest(self.layout)
        return self._device


def launch_digest(
    *,
    table: DigestTable,
    slots: torch.Tensor,
    digests_out: torch.Tensor,
    sums_out: torch.Tensor,
    region_bytes_out: torch.Tensor | None = None,
    nonfinite_out: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Reads every region of `slots` [n] and fills digests_out [n] and sums_out [n] (all int64).

    region_bytes_out: uint8 [n, R] or None; the top 8 bits of each region's share of the digest (native) or of the
    region's fold (sglang). nonfinite_out: uint8 [n] or None; 1 where any element of the slot is NaN or infinite, by the
    dtypes of the regions (`canary_kernels.nonfinite`), else 0. A slot outside [0, num_slots) is never dereferenced; its
    outputs are 0.

    Raises:
        KernelArgumentError: an argument has a wrong dtype, shape or device.
    """
    n = slots.numel()
    memory = table.layout.regions[0].memory
    check_vectors(
        "digest",
        memory,
        "layout",
        {"slots": (slots, n), "digests_out": (digests_out, n), "sums_out": (sums_out, n)},
    )
    if region_bytes_out is not None:
        check_table("digest", "region_bytes_out", region_bytes_out, len(table.layout.regions), torch.uint8)
        require_length("digest", region_bytes_out[:, 0], "region_bytes_out", n)
        require_device("digest", [(region_bytes_out, "region_bytes_out")], memory, "layout")
    if nonfinite_out is not None:
        require_contiguous("digest", nonfinite_out, "nonfinite_out")
        require_dtype("digest", nonfinite_out, "nonfinite_out", torch.uint8)
        require_length("digest", nonfinite_out, "nonfinite_out", n)
        require_device("digest", [(nonfinite_out, "nonfinite_out")], memory, "layout")
    chosen = resolve_backend("digest", backend, memory)
    if n == 0:
        return
    if chosen == "triton":
        with device_guard(memory):
            table.device()(slots, digests_out, sums_out, region_bytes_out, table.scheme, nonfinite_out)
    else:
        table.host()(slots, digests_out, sums_out, region_bytes_out, table.scheme, nonfinite_out)
    record_launch("digest")

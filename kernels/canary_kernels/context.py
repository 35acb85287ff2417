"""Containers of the canary launchers: sources of real KV bytes, plans, and the context of verify and write.

All are frozen, keyword-only dataclasses that hold the caller's tensors without copying them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch

from canary_kernels.validation import fail

MAX_REAL_KV_SOURCES = 4
SLOT_FIELD_BYTES = 32
"""Bytes of one slot record: token, position, prev_hash, real_kv_hash (int64 each)."""
PARTIAL_BYTES = 16
"""Bytes per source and slot that `RealKvHashMode.PARTIAL` reads."""
VIOLATION_FIELDS = 8
RING_INDEX_LIMIT = 1 << 30
"""The violation counter is exact up to here and stays here: it never wraps."""
BAD_SLOT = (1 << 63) - 1
"""A plan's slot, predecessor or seed that could not be looked up. Never dereferenced."""


class RealKvHashMode(IntEnum):
    """How much of each source the real-KV hash covers."""

    NONE = 0
    PARTIAL = 1
    ALL = 2


class CanaryLaunchTag(IntEnum):
    """Which launch wrote a violation row."""

    HEAD_K_FULL = 0
    HEAD_V_FULL = 1
    TAIL_K_FULL = 2
    TAIL_V_FULL = 3
    SWEEP_K_FULL = 4
    SWEEP_V_FULL = 5
    HEAD_K_SWA = 6
    HEAD_V_SWA = 7
    TAIL_K_SWA = 8
    TAIL_V_SWA = 9
    SWEEP_K_SWA = 10
    SWEEP_V_SWA = 11


class FailReason(IntFlag):
    """Bits of the last field of a violation row."""

    VERIFY_CHAIN_HASH_MISMATCH = 1
    VERIFY_POSITION_MISMATCH = 2
    VERIFY_REAL_KV_HASH_MISMATCH = 4
    WRITE_TOKEN_MISMATCH = 8
    WRITE_POSITION_MISMATCH = 16
    VERIFY_TOKEN_MISMATCH = 32
    SLOT_OUT_OF_RANGE = 64


def validate_real_kv_source(
    *,
    page_size: int,
    num_bytes_per_token: int,
    read_bytes: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    element_size: int,
    dtype: torch.dtype,
    address: int,
) -> None:
    """Check one source in the contract's order; `shape` and `strides` in elements, `address` in bytes."""
    kernel = "real_kv_source"
    if page_size < 1:
        fail(kernel, "page_size", "range", f"RealKvSource.page_size must be >= 1, got {page_size}")
    if num_bytes_per_token <= 0 or num_bytes_per_token % 16:
        fail(
            kernel,
            "num_bytes_per_token",
            "range",
            f"RealKvSource.num_bytes_per_token must be a positive multiple of 16, got {num_bytes_per_token}",
        )
    if read_bytes <= 0 or read_bytes % 16 or read_bytes > num_bytes_per_token:
        fail(
            kernel,
            "read_bytes",
            "range",
            "RealKvSource.read_bytes must be a positive multiple of 16 in "
            f"(0, num_bytes_per_token={num_bytes_per_token}], got {read_bytes}",
        )
    if len(shape) < 2:
        fail(kernel, "tensor", "shape", f"RealKvSource.tensor must be at least 2-D, got shape {shape}")
    row_stride = strides[0] * element_size
    if row_stride % 16:
        fail(
            kernel,
            "tensor",
            "stride",
            f"RealKvSource.tensor row stride must be a multiple of 16 bytes, got {row_stride} bytes "
            f"(shape={shape}, strides={strides}, dtype={dtype})",
        )
    width = math.prod(shape[1:]) * element_size
    needed = page_size * num_bytes_per_token
    if width < needed:
        fail(
            kernel,
            "tensor",
            "length",
            f"RealKvSource.tensor row is {width} bytes wide but page_size={page_size} x "
            f"num_bytes_per_token={num_bytes_per_token} needs {needed} (shape={shape}, dtype={dtype})",
        )
    if address % 16:
        fail(kernel, "tensor", "alignment", f"RealKvSource.tensor base address must be 16-byte aligned, got {address}")


@dataclass(frozen=True, kw_only=True)
class RealKvSource:
    """One tensor whose bytes go into a slot's real-KV hash.

    Byte k of slot s is in row `s // page_size` at byte column `(s % page_size) * num_bytes_per_token + k`. Rows are
    `tensor.stride(0)` apart; what a row holds beyond `page_size * num_bytes_per_token` bytes is ignored.

    Args:
        tensor: any dtype, [rows, row elements], rows packed; row stride and base address multiples of 16 bytes.
        page_size: slots per row, >= 1.
        num_bytes_per_token: bytes, positive multiple of 16.
        read_bytes: leading bytes that mode ALL hashes, positive multiple of 16, at most `num_bytes_per_token`.

    Raises:
        KernelArgumentError: kernel `real_kv_source`, if any of that does not hold.
    """

    tensor: torch.Tensor
    page_size: int
    num_bytes_per_token: int
    read_bytes: int

    def __post_init__(self) -> None:
        tensor = self.tensor
        validate_real_kv_source(
            page_size=self.page_size,
            num_bytes_per_token=self.num_bytes_per_token,
            read_bytes=self.read_bytes,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            element_size=tensor.element_size(),
            dtype=tensor.dtype,
            address=tensor.data_ptr(),
        )


@dataclass(frozen=True, kw_only=True)
class VerifyPlan:
    """What one verify launch looks at: flat entries, of which the first `verify_num_valid` count.

    Args:
        verify_slot_indices: int64 [capacity].
        verify_expected_tokens: int64 [capacity], -1 for "do not compare".
        verify_expected_positions: int64 [capacity].
        verify_prev_slot_indices: int64 [capacity], predecessor in the chain; < 0: the entry is a chain's head.
        verify_num_valid: int32 [1].
        enable: int32 [1], 0 skips the launch's work.
    """

    verify_slot_indices: torch.Tensor
    verify_expected_tokens: torch.Tensor
    verify_expected_positions: torch.Tensor
    verify_prev_slot_indices: torch.Tensor
    verify_num_valid: torch.Tensor
    enable: torch.Tensor

    @classmethod
    def allocate(cls, *, verify_capacity: int, device: torch.device | str) -> VerifyPlan:
        """A plan of no valid entries, enabled; entries are uninitialised. KernelArgumentError if not positive."""
        if verify_capacity <= 0:
            fail(
                "verify_plan",
                "verify_capacity",
                "range",
                f"VerifyPlan verify_capacity must be positive, got {verify_capacity}",
            )
        return cls(
            verify_slot_indices=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_expected_tokens=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_expected_positions=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_prev_slot_indices=torch.empty(verify_capacity, dtype=torch.int64, device=device),
            verify_num_valid=torch.zeros(1, dtype=torch.int32, device=device),
            enable=torch.ones(1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Which tokens of a write launch belong to which request, and where each request's chain goes on.

    Args:
        write_offsets: int64 [capacity + 1], exclusive prefix sum over requests.
        write_seed_slot_indices: int64 [capacity], the slot before a request's first token; < 0: none.
        write_num_valid_reqs: int32 [1].
    """

    write_offsets: torch.Tensor
    write_seed_slot_indices: torch.Tensor
    write_num_valid_reqs: torch.Tensor

    @classmethod
    def allocate(cls, *, write_req_capacity: int, device: torch.device | str) -> WritePlan:
        """A plan of no valid requests; the rest is uninitialised. KernelArgumentError if not positive."""
        if write_req_capacity <= 0:
            fail(
                "write_plan",
                "write_req_capacity",
                "range",
                f"WritePlan write_req_capacity must be positive, got {write_req_capacity}",
            )
        return cls(
            write_offsets=torch.empty(write_req_capacity + 1, dtype=torch.int64, device=device),
            write_seed_slot_indices=torch.empty(write_req_capacity, dtype=torch.int64, device=device),
            write_num_valid_reqs=torch.zeros(1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, kw_only=True)
class VerifyOrWriteContext:
    """What verify and write launches share.

    Args:
        canary_buf: uint8 [num_slots, stride >= 32], one record per slot.
        kernel_kind: goes into violation rows.
        violation_ring: int64 [n, 8].
        violation_write_index: int32 [1], rows ever recorded; exact to 2^30, never wraps.
        slot_run_counter: int64 [1], entries looked at or slots written.
        kernel_run_counter: int64 [1], launches.
        real_kv_sources: at most four.
        real_kv_hash_mode: how much of each source is hashed.
        enable_chain_position_assert: int32 [1], nonzero lets write compare positions with their predecessors'.
    """

    canary_buf: torch.Tensor
    kernel_kind: CanaryLaunchTag
    violation_ring: torch.Tensor
    violation_write_index: torch.Tensor
    slot_run_counter: torch.Tensor
    kernel_run_counter: torch.Tensor
    real_kv_sources: tuple[RealKvSource, ...]
    real_kv_hash_mode: RealKvHashMode
    enable_chain_position_assert: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class HashedSource:
    """A source as the kernels read it: `rows` is uint8 [rows, bytes], all else in bytes."""

    rows: torch.Tensor
    page_size: int
    token_bytes: int
    read_bytes: int

    @property
    def row_stride(self) -> int:
        """Bytes from one row to the next."""
        return self.rows.stride(0)

    @property
    def num_slots(self) -> int:
        """Slots that the source has bytes for."""
        return self.rows.shape[0] * self.page_size


def hashed_sources(context: VerifyOrWriteContext) -> tuple[HashedSource, ...]:
    """The sources that the context's hash mode reads, in order; none for NONE. Call after validation."""
    mode = RealKvHashMode(context.real_kv_hash_mode)
    if mode == RealKvHashMode.NONE:
        return ()
    return tuple(
        HashedSource(
            rows=source.tensor.view(torch.uint8),
            page_size=source.page_size,
            token_bytes=source.num_bytes_per_token,
            read_bytes=PARTIAL_BYTES if mode == RealKvHashMode.PARTIAL else source.read_bytes,
        )
        for source in context.real_kv_sources
    )


def slot_limit(num_slots: int, sources: tuple[HashedSource, ...]) -> int:
    """Slots from here on are out of range: beyond the canary buffer, or beyond a source that is hashed."""
    return min(num_slots, *(source.num_slots for source in sources)) if sources else num_slots

"""Constants of both fingerprints (CONTRACT part 1 and 2), as Python ints and as wrapped int64 values."""

from __future__ import annotations

MASK64 = (1 << 64) - 1

SPLITMIX_MUL_1 = 0xBF58476D1CE4E5B9
SPLITMIX_MUL_2 = 0x94D049BB133111EB
ANCHOR = 0xC0FFEE1234567890
CHAIN_HEAD = 0xDE7FAE23A9A1B716
"""`s(ANCHOR)`: the prev_hash of a chain's first slot (namespace 0)."""
WORD_STEP = 0x9E3779B97F4A7C15
"""Native digest: multiplies the word number + 1 in `key(r, j)`."""
CHAIN_STEP = 0xD1342543DE82EF95
"""Native digest: multiplies the region number + 1 in `key(r, j)`; native chain: the factor R."""
CHAIN_STEP_INVERSE = 0x572B5EE77A54E3BD
"""R^-1 mod 2^64."""

RECORD_BYTES = 64
"""Bytes of one slot record: token, position, prev_hash, digest, sum, generation, flags, prev_digest (int64 each)."""

NOTE_UNCHANGED = 1
"""A slot's digest and sum are those that its record held before it was stamped."""
NOTE_NONFINITE = 2
"""A slot holds a NaN or an infinity."""


def signed(value: int) -> int:
    """The int64 with the same bits as the unsigned 64-bit `value`."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    """The unsigned 64-bit integer with the same bits as the int64 `value`."""
    return value & MASK64


def mix(value: int) -> int:
    """`s(x)`, the splitmix64 finaliser, on Python ints (unsigned in, unsigned out)."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * SPLITMIX_MUL_1) & MASK64
    value = ((value ^ (value >> 27)) * SPLITMIX_MUL_2) & MASK64
    return value ^ (value >> 31)

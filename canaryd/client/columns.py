"""Columns of integers from an engine's buffers, in two steps: a copy on its thread, the wire form later.

Values may be lists, `array.array`, numpy arrays, CPU tensors or memoryviews of any integer type, or raw little-endian
int64 as bytes.
"""

from __future__ import annotations

import array
import ctypes
from collections.abc import Iterable
from typing import Any

from canaryd.wire.limits import INT64_MAX

Ints = bytes | bytearray | memoryview | Iterable[int]

Kept = bytes | tuple[int, ...] | list[Any]
"""Values copied and not yet looked at: raw bytes, the integers of a list, or `[dtype, data]` of an array."""

_INTEGER_BYTES = 40
"""What an integer of a list costs while it waits: a reference and an object."""


def column(values: Ints) -> bytes:
    """The values as a wire column: a copy, int64, little-endian, in C order.

    Raises TypeError for what is not integers, OverflowError for an integer of more than 64 bits, ValueError for raw
    bytes whose number is not a multiple of 8.
    """
    if isinstance(values, (bytes, bytearray)):
        return _raw(bytes(values))
    if isinstance(values, memoryview):
        return _raw(values.tobytes()) if values.format == "B" else _from_integers(values.tolist())
    if hasattr(values, "dtype"):
        return unkept(keep(values))
    return _from_integers(values)


def keep(values: Ints) -> Kept:
    """A copy of `values` at the least cost for the engine's thread; `unkept` makes the column of it.

    What is no list and no array is rare and becomes a column at once. Raises as `column` does, now or then.
    """
    if type(values) is list:
        return tuple(values)
    if type(values) is bytes:
        return values
    if hasattr(values, "dtype"):
        return _copy_of_array(values)
    return column(values)


def unkept(kept: Kept) -> bytes:
    """The column of what `keep` returned. Raises as `column` does."""
    if type(kept) is bytes:
        return _raw(kept)
    return _from_array(*kept) if type(kept) is list else _from_integers(kept)


def kept_bytes(kept: Kept) -> int:
    """About how many bytes of memory hold what `keep` returned."""
    if type(kept) is tuple:
        return _INTEGER_BYTES * len(kept)
    return len(kept[1]) if type(kept) is list else len(kept)


def _copy_of_array(values: Any) -> list[Any]:
    if hasattr(values, "tobytes"):
        return [values.dtype, values.tobytes()]
    if values.is_cpu and values.is_contiguous():
        # `numpy()` lets go of the interpreter's lock, and the client's thread may then hold it for a whole turn
        return [values.dtype, ctypes.string_at(values.data_ptr(), values.nbytes)]
    values = values.numpy()  # a tensor on a GPU raises TypeError here
    return [values.dtype, values.tobytes()]


def _from_array(dtype: Any, data: bytes) -> bytes:
    import numpy as np  # the engine that gave an array has it; the client does not depend on it

    if not isinstance(dtype, np.dtype):
        dtype = np.dtype(str(dtype).removeprefix("torch."))  # a tensor's
    if dtype.str == "<i8":
        return data
    if dtype.kind not in "iu":
        raise TypeError(f"columns hold integers, got an array of {dtype}")
    values = np.frombuffer(data, dtype)
    if dtype.kind == "u" and values.size and int(values.max()) > INT64_MAX:
        raise OverflowError("columns hold signed integers of 64 bits")
    return values.astype("<i8").tobytes()


def _from_integers(values: Iterable[int]) -> bytes:
    return array.array("q", values).tobytes()


def _raw(data: bytes) -> bytes:
    if len(data) % 8:
        raise ValueError(f"raw columns hold 8 bytes per value, got {len(data)} bytes")
    return data

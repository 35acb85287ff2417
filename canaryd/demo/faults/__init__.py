"""The fault classes by name."""

from __future__ import annotations

from canaryd.demo.faults import contents, inputs, prefix, tables
from canaryd.demo.faults.injection import STANDS, Fault, Injection

__all__ = ["FAULTS", "STANDS", "Fault", "Injection"]

FAULTS: dict[str, Fault] = {
    "bit_flip_1": contents.bit_flips(1),
    "bit_flip_2": contents.bit_flips(2),
    "bit_flip_8": contents.bit_flips(8),
    "word": contents.word,
    "layer_row": contents.layer_row,
    "page": contents.whole_page,
    "stride_clear": contents.stride_clear,
    "long_copy": contents.long_copy,
    "wrapped_slot": contents.wrapped_slot,
    "padding_row": contents.padding_row,
    "write_after_free": contents.write_after_free,
    "tokens_swapped": contents.tokens_swapped,
    "shared_page": tables.shared_page,
    "table_swap": tables.table_swap,
    "duplicate_page": tables.duplicate_page,
    "reserved_page": tables.reserved_page,
    "stale_prefix": tables.stale_prefix,
    "shared_prefix": prefix.shared_prefix,
    "token_off_by_one": inputs.token_off_by_one,
    "position_off_by_one": inputs.position_off_by_one,
}
"""How each class of `canaryd.demo.classes` is injected."""

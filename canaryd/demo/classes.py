"""The fault classes by name, and which checks can name each. Imported by processes that need no torch."""

from __future__ import annotations

_LINKS = frozenset({"owner", "token", "position", "chain"})

CLASSES: dict[str, frozenset[str]] = {
    "bit_flip_1": frozenset({"content"}),
    "bit_flip_2": frozenset({"content"}),
    "bit_flip_8": frozenset({"content"}),
    "word": frozenset({"content"}),
    "layer_row": frozenset({"content"}),
    "page": frozenset({"content"}),
    "stride_clear": frozenset({"content"}),
    "long_copy": frozenset({"content"}),
    "wrapped_slot": frozenset({"content"}),
    "padding_row": frozenset({"content"}),
    "write_after_free": frozenset({"content"}),
    "tokens_swapped": frozenset({"content"}),
    "shared_page": frozenset({"owner", "token", "position", "chain"}),
    "table_swap": _LINKS,
    "duplicate_page": frozenset({"range"}),
    "reserved_page": frozenset({"range"}),
    "stale_prefix": _LINKS,
    "shared_prefix": frozenset({"content"}),
    "token_off_by_one": frozenset({"input"}),
    "position_off_by_one": frozenset({"input"}),
}


EVICTED = "shared_prefix"
"""The class that shows an engine evicting; it makes sense with no other."""


def classes_for(model: str, on_finding: str = "report") -> list[str]:
    """Classes that an engine of this model can suffer: without prefix sharing nothing hits a stale prefix."""
    if on_finding == "evict":
        return [EVICTED]
    return [name for name in CLASSES if name != EVICTED and (model == "llama" or name != "stale_prefix")]

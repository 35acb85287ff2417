"""Canary plan, write, verify and digest kernels, each beside a torch reference.

Launchers take keyword arguments only. Triton is imported by the first launch that needs it.
"""

from __future__ import annotations

from canary_kernels.chain import chain_hashes, chain_head
from canary_kernels.compare import COMPARE_FIELDS, launch_compare
from canary_kernels.digest import DigestTable, launch_digest
from canary_kernels.findings import Findings
from canary_kernels.items import ItemRuns, Items, launch_plan_items
from canary_kernels.launches import Backend, set_launch_observer
from canary_kernels.layout import GroupLayout, Region
from canary_kernels.links import LINK_FIELDS, launch_links
from canary_kernels.locate import WordChange, locate_word_change
from canary_kernels.records import CHAIN_UNKNOWN, OUT_OF_RANGE_SLOT, STAMPED, SlotRecord, allocate_records
from canary_kernels.scheme import SCHEMES, Scheme
from canary_kernels.stamp import launch_stamp
from canary_kernels.validation import KernelArgumentError, set_validation_observer

__all__ = [
    "CHAIN_UNKNOWN",
    "COMPARE_FIELDS",
    "LINK_FIELDS",
    "OUT_OF_RANGE_SLOT",
    "SCHEMES",
    "STAMPED",
    "Backend",
    "DigestTable",
    "Findings",
    "GroupLayout",
    "ItemRuns",
    "Items",
    "KernelArgumentError",
    "Region",
    "Scheme",
    "SlotRecord",
    "WordChange",
    "allocate_records",
    "chain_hashes",
    "chain_head",
    "launch_compare",
    "launch_digest",
    "launch_links",
    "launch_plan_items",
    "launch_stamp",
    "locate_word_change",
    "set_launch_observer",
    "set_validation_observer",
]

"""Canary plan, write, verify and digest kernels, each beside a torch reference.

Launchers take keyword arguments only. Triton is imported by the first launch that needs it.
"""

from __future__ import annotations

from canary_kernels.chain import chain_hashes, chain_head
from canary_kernels.compare import COMPARE_FIELDS, launch_compare
from canary_kernels.constants import NOTE_NONFINITE, NOTE_UNCHANGED
from canary_kernels.context import (
    CanaryLaunchTag,
    FailReason,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    validate_real_kv_source,
)
from canary_kernels.digest import DigestTable, launch_digest
from canary_kernels.findings import Findings
from canary_kernels.items import ItemRuns, Items, launch_plan_items
from canary_kernels.launches import Backend, set_launch_observer
from canary_kernels.layout import GroupLayout, Region
from canary_kernels.links import LINK_FIELDS, launch_links
from canary_kernels.locate import WordChange, locate_word_change
from canary_kernels.nonfinite import NONFINITE_RULES, NonfiniteRule
from canary_kernels.notes import NOTE_FIELDS, launch_notes
from canary_kernels.plan import (
    launch_canary_plan_kernels,
    launch_plan_entries_kernel,
    launch_plan_offsets_kernel,
    validate_plan,
    validate_plan_entries,
    validate_plan_offsets,
)
from canary_kernels.records import CHAIN_UNKNOWN, OUT_OF_RANGE_SLOT, STAMPED, SlotRecord, allocate_records
from canary_kernels.scatter import launch_scatter_req_token_ids_kernel, validate_scatter
from canary_kernels.scheme import SCHEMES, Scheme
from canary_kernels.stamp import launch_stamp
from canary_kernels.validation import KernelArgumentError, KernelArgumentTypeError, set_validation_observer
from canary_kernels.verify import launch_canary_verify_kernel, validate_canary_verify
from canary_kernels.write import launch_canary_write_kernel, validate_canary_write

__all__ = [
    "CHAIN_UNKNOWN",
    "COMPARE_FIELDS",
    "LINK_FIELDS",
    "NONFINITE_RULES",
    "NOTE_FIELDS",
    "NOTE_NONFINITE",
    "NOTE_UNCHANGED",
    "OUT_OF_RANGE_SLOT",
    "SCHEMES",
    "STAMPED",
    "Backend",
    "CanaryLaunchTag",
    "DigestTable",
    "FailReason",
    "Findings",
    "GroupLayout",
    "ItemRuns",
    "Items",
    "KernelArgumentError",
    "KernelArgumentTypeError",
    "NonfiniteRule",
    "RealKvHashMode",
    "RealKvSource",
    "Region",
    "Scheme",
    "SlotRecord",
    "VerifyOrWriteContext",
    "VerifyPlan",
    "WordChange",
    "WritePlan",
    "allocate_records",
    "chain_hashes",
    "chain_head",
    "launch_canary_plan_kernels",
    "launch_canary_verify_kernel",
    "launch_canary_write_kernel",
    "launch_compare",
    "launch_digest",
    "launch_links",
    "launch_notes",
    "launch_plan_entries_kernel",
    "launch_plan_items",
    "launch_plan_offsets_kernel",
    "launch_scatter_req_token_ids_kernel",
    "launch_stamp",
    "locate_word_change",
    "set_launch_observer",
    "set_validation_observer",
    "validate_canary_verify",
    "validate_canary_write",
    "validate_plan",
    "validate_plan_entries",
    "validate_plan_offsets",
    "validate_real_kv_source",
    "validate_scatter",
]

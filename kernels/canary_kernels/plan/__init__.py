"""Plans: which slots a step's rows read (verify) and where their chains go on (write)."""

from canary_kernels.plan.entries import launch_plan_entries_kernel, validate_plan_entries
from canary_kernels.plan.launch import launch_canary_plan_kernels, validate_plan
from canary_kernels.plan.offsets import launch_plan_offsets_kernel, validate_plan_offsets

__all__ = [
    "launch_canary_plan_kernels",
    "launch_plan_entries_kernel",
    "launch_plan_offsets_kernel",
    "validate_plan",
    "validate_plan_entries",
    "validate_plan_offsets",
]

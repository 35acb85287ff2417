"""Plans: which slots a step's rows read (verify) and where their chains go on (write)."""

from canary_kernels.plan.entries import launch_plan_entries_kernel
from canary_kernels.plan.launch import launch_canary_plan_kernels
from canary_kernels.plan.offsets import launch_plan_offsets_kernel

__all__ = ["launch_canary_plan_kernels", "launch_plan_entries_kernel", "launch_plan_offsets_kernel"]

"""Launchers of the plan kernels."""

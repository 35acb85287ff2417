"""Canary plan, write, verify and digest kernels, each beside a torch reference."""

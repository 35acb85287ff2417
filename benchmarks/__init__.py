"""Benchmarks: `python -m benchmarks.gpu` and the scripts beside it; see the README in this folder."""

"""Benchmarks: `python -m benchmarks.gpu` and `python -m benchmarks.cpu`; see the README in this folder."""

"""Triton device code, imported only when a Triton backend is asked for."""

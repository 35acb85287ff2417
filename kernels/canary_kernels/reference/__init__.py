"""Vectorised torch references; also the backend of host pools."""

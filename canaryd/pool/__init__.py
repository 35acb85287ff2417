"""Mapping an engine's KV pool: memory handles, bounds, regions."""

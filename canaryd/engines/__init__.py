"""Adapters that call the client for one engine each."""

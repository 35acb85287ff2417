"""For authors of adapters: run an engine under `ConformanceClient` and learn where it breaks the contract."""

from canaryd.testing.conformance import ConformanceClient, Violation

__all__ = ["ConformanceClient", "Violation"]

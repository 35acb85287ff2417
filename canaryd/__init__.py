"""canaryd: a KV-cache corruption detector that runs beside an LLM serving engine."""

__version__ = "0.1.0"

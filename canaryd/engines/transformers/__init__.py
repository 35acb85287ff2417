"""The adapter for Hugging Face transformers' continuous batching, 5.18 and later."""

from canaryd.engines.transformers.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]

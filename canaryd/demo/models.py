"""Small random models and the continuous-batching configuration of the demo: no download, a few megabytes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma3 import Gemma3ForCausalLM, Gemma3TextConfig

ModelKind = Literal["llama", "sliding"]

VOCABULARY = 997
SLIDING_WINDOW = 96
PAGE_SIZE = 16


def build_model(kind: ModelKind, *, seed: int, device: str = "cpu", window: int = SLIDING_WINDOW) -> Any:
    """A random four-layer model in evaluation mode: `llama`, or `sliding`: a window in all layers but one."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "attn_implementation": "sdpa",
    }
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        layers = ["sliding_attention"] * 3 + ["full_attention"]
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, sliding_window=window, layer_types=layers))
    return model.to(device).eval()


def batching_config(**changes: Any) -> ContinuousBatchingConfig:
    """Continuous batching with short pages, no CUDA graphs and nothing to fetch from elsewhere."""
    settings: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "num_blocks": 256,
        "max_batch_tokens": 256,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "max_memory_percent": 0.5,
    }
    if "auto_switch_to_flash" in {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}:
        settings["auto_switch_to_flash"] = False  # newer versions may look for kernels on a hub
    return ContinuousBatchingConfig(**(settings | changes))


def generation_config(*, max_new_tokens: int, sample: bool = False, sequences: int = 1) -> GenerationConfig:
    """Generation without an end token, so that lengths are what the caller asks for."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sample,
        num_return_sequences=sequences,
        eos_token_id=-1,
        pad_token_id=0,
    )

"""Random checkpoints of each architecture, written by transformers: two layers in which every part matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 300
MAX_POSITION = 256

SHAPES: dict[str, dict[str, Any]] = {
    "gqa1": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "gqa3": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
    "gqa8": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    "dim80": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 80},
    "dim128": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "dim256": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256},
    "untied": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": False},
}
FAMILIES = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 7},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Gemma3ForCausalLM": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 100,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


def randomise(model: torch.nn.Module) -> None:
    """Weights that make every part matter: activations of order one, norms and biases that are not trivial."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            parameter.data = noise * 1.5 / parameter.shape[1] ** 0.5
        else:
            parameter.data = 0.2 * noise + (1.0 if "norm" in name else 0.0)


def checkpoint(folder: Path, family: str, settings: dict[str, Any]) -> Any:
    """A transformers model with random weights, saved to `folder`."""
    config = FAMILIES[family](
        **{
            "vocab_size": VOCAB,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "max_position_embeddings": MAX_POSITION,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **settings,
        }
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, family)(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    return model

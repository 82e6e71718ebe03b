"""LoRA adapters of random numbers, in the form in which PEFT saves them, for the checkpoints of `random_models` and others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model.model.layers"


def module_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear modules of a layer. config: of transformers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    return shapes | {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def write_adapter(
    folder: Path,
    config: Mapping[str, Any],
    *,
    seed: int,
    rank: int = 8,
    modules: Sequence[str] = ATTENTION + MLP,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    prefix: str = PREFIX,
    **settings: Any,
) -> Path:
    """An adapter that adds to each of these modules about `strength` times what it has. settings: more of the configuration;
    ranks are those of its rank_pattern."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    ranks = settings.get("rank_pattern", {})
    for layer in range(config["num_hidden_layers"]):
        for name, (num_outputs, num_inputs) in module_shapes(config).items():
            if name not in modules:
                continue
            r, parent = ranks.get(name, rank), "self_attn" if name in ATTENTION else "mlp"
            a, b = torch.randn(r, num_inputs, generator=generator), torch.randn(num_outputs, r, generator=generator)
            tensors[f"{prefix}.{layer}.{parent}.{name}.lora_A.weight"] = (a / num_inputs**0.5).to(dtype)
            tensors[f"{prefix}.{layer}.{parent}.{name}.lora_B.weight"] = (b * strength / r**0.5).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules), "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM", **written}))
    return folder

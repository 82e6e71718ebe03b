"""A GGUF file's metadata in the spelling of `config.json`, and the Hugging Face names of its tensors.

Knows what llama.cpp's converters write for the architectures that this build runs, and which of their changes to the weights
have to be undone. Called by `decoder_config` and `checkpoint`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.errors import ModelFileError, Refusal, UnsupportedError
from halfbyte.model_runner.gguf import GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# Tokens that end a turn whatever the metadata says, when the file marks them as control tokens.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>")
CONTROL_TOKEN = 3
ROPE_FACTORS = "rope_freqs.weight"

MAX_LAYERS = 10_000
_MAX_SIZE = 1 << 31
_GEMMA_FULL_EVERY = 6
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62
_LLAMA3_LENGTHS = (8192, 4096, 16384, 32768)

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA_LAYER = {
    **_IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(name: str, architecture: str) -> str:
    """The Hugging Face name of a GGUF tensor; the name itself when it has none."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER_TENSOR.fullmatch(name)
    names = _IN_GEMMA_LAYER if architecture == "gemma3" else _IN_LAYER
    if match is None or match[2] not in names:
        return name
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"


def config_values(path: Path) -> dict[str, Any]:
    """What `config.json` would say of the model in this file, with every key that `decoder_config` reads."""
    with GGUFFile(path) as file:
        return _Metadata(file).values()


class _Metadata:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = file.architecture
        if self.prefix not in ARCHITECTURES:
            raise self.refuse(f"architecture {self.prefix} is not supported", f"supported are {', '.join(ARCHITECTURES)}")

    def refuse(self, reason: str, fix: str = "") -> UnsupportedError:
        return UnsupportedError(Refusal(f"{self.file.path}: {reason}", fix))

    def get(self, key: str, default: Any = None) -> Any:
        """A scalar. Per-layer arrays are accepted where all layers agree."""
        name = f"{self.prefix}.{key}"
        value = self.file.metadata.get(name, default)
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                raise self.refuse(f"{name} differs between layers, which is not supported")
            value = value[0].item()
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFileError(f"{self.file.path}: the metadata has no {self.prefix}.{key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MAX_SIZE:
            raise ModelFileError(
                f"{self.file.path}: {self.prefix}.{key} must be an integer from 1 to {_MAX_SIZE - 1}, got {value!r}"
            )
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def values(self) -> dict[str, Any]:
        if self.get("expert_count", 0):
            raise self.refuse("a mixture of experts is not supported")
        heads, hidden_size = self.integer("attention.head_count"), self.integer("embedding_length")
        num_layers = self.integer("block_count")
        if num_layers > MAX_LAYERS:
            raise ModelFileError(f"{self.file.path}: {self.prefix}.block_count must be at most {MAX_LAYERS}, got {num_layers}")
        head_dim = self.integer("attention.key_length", hidden_size // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(key, head_dim) != head_dim:
                raise self.refuse(f"{key} {self.get(key)} differs from the head dimension {head_dim}, which is not supported")
        values = {
            "architectures": [ARCHITECTURES[self.prefix]],
            "vocab_size": self.vocab_size(),
            "hidden_size": hidden_size,
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.integer("context_length"),
            "rms_norm_eps": self.need("attention.layer_norm_rms_epsilon"),
            "rope_parameters": self.rope(head_dim),
            "hidden_act": "silu",
            "attention_bias": self.has("blk.0.attn_q.bias"),
            "output_bias": self.has("blk.0.attn_output.bias"),
            "mlp_bias": self.has("blk.0.ffn_gate.bias"),
            "tie_word_embeddings": not self.has("output.weight"),
            "sliding_window": self.get("attention.sliding_window"),
            "layer_types": ["full_attention"] * num_layers,
            "dtype": self.dtype(),
            "bos_token_id": self.file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.eos_token_ids(),
        }
        if self.prefix == "llama" and values["sliding_window"]:
            values["architectures"] = ["MistralForCausalLM"]
        return values | self.gemma3(values) if self.prefix == "gemma3" else values

    def gemma3(self, values: dict[str, Any]) -> dict[str, Any]:
        """Five layers with a window, then a full one; the largest size scales queries by its own number."""
        every = self.integer("attention.sliding_window_pattern", _GEMMA_FULL_EVERY)
        num_layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
        largest = num_layers == _GEMMA_27B_LAYERS
        return {
            "hidden_act": "gelu_pytorch_tanh",
            "layer_types": ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(num_layers)],
            "query_pre_attn_scalar": values["hidden_size"] // heads if largest else values["head_dim"],
            "rope_parameters": {
                "full_attention": values["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": self.get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)},
            },
            "attn_logit_softcapping": self.get("attn_logit_softcapping"),
            "final_logit_softcapping": self.get("final_logit_softcapping"),
        }

    def vocab_size(self) -> int | None:
        """The width of the logits: the rows of the embedding, which the vocabulary may fall short of."""
        embedding = self.file.tensors.get("token_embd.weight")
        return embedding.shape[0] if embedding is not None else self.get("vocab_size")

    def dtype(self) -> str:
        amounts: dict[str, int] = {}
        for info in self.file.tensors.values():
            amounts[info.type_name] = amounts.get(info.type_name, 0) + info.num_bytes
        most = max(amounts, key=lambda name: amounts[name], default="F32")
        return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")

    def eos_token_ids(self) -> list[int]:
        """What the metadata calls the end of a text, a turn or a message, and well-known control tokens of that meaning."""
        metadata = self.file.metadata
        found = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
        tokens, kinds = metadata.get("tokenizer.ggml.tokens", []), metadata.get("tokenizer.ggml.token_type")
        if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
            found += [int(i) for i in np.flatnonzero(kinds == CONTROL_TOKEN) if tokens[i] in END_TOKENS]
        return list(dict.fromkeys(i for i in found if isinstance(i, int)))

    def rope(self, head_dim: int) -> dict[str, Any]:
        parameters = {"rope_type": "default", "rope_theta": self.get("rope.freq_base", 10_000.0)}
        kind = self.get("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn"):
            raise self.refuse(f"rotary scaling {kind!r} is not supported", "supported are none, linear, yarn")
        if kind != "none":
            factor = self.need("rope.scaling.factor")
            if not isinstance(factor, (int, float)) or not 1.0 <= factor < math.inf:
                raise ModelFileError(f"{self.file.path}: rope.scaling.factor must be at least 1, got {factor!r}")
            parameters |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = self.need("rope.scaling.original_context_length")
            for name in ("beta_fast", "beta_slow"):
                if (value := self.get(f"rope.scaling.yarn_{name}")) is not None:
                    parameters[name] = value
            if (multiplier := self.get("rope.scaling.attn_factor")) is not None:
                parameters["attention_factor"] = multiplier * (0.1 * math.log(parameters["factor"]) + 1.0)
        if self.has(ROPE_FACTORS):
            parameters |= self.llama3(parameters, head_dim)
        return parameters

    def llama3(self, parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
        """The settings behind a stored table of frequency divisors, found by making the table again."""
        stored = self.file.read_tensor(ROPE_FACTORS).ravel().astype(np.float64)
        if stored.size != head_dim // 2 or parameters["rope_type"] != "default":
            raise self.refuse(f"{ROPE_FACTORS} with {stored.size} values does not go with the other rotary settings")
        if np.allclose(stored, 1.0):
            return {}
        given = self.get("rope.scaling.original_context_length")
        for original in (given, *_LLAMA3_LENGTHS) if given else _LLAMA3_LENGTHS:
            found = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            table = _llama3_divisors(parameters["rope_theta"], head_dim, original, **found)
            if np.allclose(table, stored, rtol=1e-4):
                return {"rope_type": "llama3", "original_max_position_embeddings": original, **found}
        raise self.refuse(f"the rotary frequencies in {ROPE_FACTORS} follow no known rule")


def _llama3_divisors(
    theta: float, head_dim: int, original: int, *, factor: float, low_freq_factor: float, high_freq_factor: float
) -> np.ndarray:
    """By how much "llama3" scaling divides each frequency: 1 for short wavelengths, `factor` for long ones."""
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = original * frequency / (2 * math.pi)
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)

"""`DecoderConfig`: what a decoder-only model looks like, in one frozen record, whatever file it came from.

Knows how `config.json` and GGUF metadata spell the same facts, and which architectures this build runs. It must not know
weights, devices or torch. Called by the loader and the models (which read only the record) and by the engine's start-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, rotate-half layout (the first half of the head pairs with the second).

    scaling: None for plain rotary, else a mapping with "rope_type" in linear, dynamic, yarn, llama3, "factor", and the
    type's own keys as `config.json` names them; "original_max_position_embeddings" is always present for dynamic, yarn and
    llama3, and "max_position_embeddings" for all.
    """

    theta: float
    scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The shape and the constants of a decoder.

    architecture: a key of `models.MODELS`. layer_windows[i]: None, or w: a query at position p of layer i sees the keys
    p - w + 1 .. p. Layers with a window use `local_rope` where it is set, every other layer `rope`.
    attention_scale multiplies q . k. embed_scale multiplies the embeddings after it is rounded to the model dtype
    (1.0: no scaling). A soft cap c maps x to c * tanh(x / c). attention_bias is for q, k and v, output_bias for o.
    hidden_act: "silu" or "gelu_pytorch_tanh" (gate activation). norm_unit_offset: checkpoints store w for a norm that
    multiplies by 1 + w. max_position: longest context in tokens. checkpoint_dtype: float32, float16 or bfloat16.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    layer_windows: tuple[int | None, ...] = ()
    attention_scale: float = 1.0
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_unit_offset: bool = False
    hidden_act: str = "silu"
    tie_embeddings: bool = False
    embed_scale: float = 1.0
    checkpoint_dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

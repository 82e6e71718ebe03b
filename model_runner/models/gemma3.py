"""Gemma 3, text: sliding-window layers with their own rotary base between full ones, q/k norms, four norms per layer.

Norm weights are stored as w for 1 + w, embeddings are scaled by the root of the hidden size, the MLP's gate is a tanh GELU,
and scores and logits are capped where the configuration says so. All of that is configuration; the layer is here.

Shape letters: T tokens, E hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.layers.attention import Attention
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.decoder import DecoderLayer
from halfbyte.model_runner.layers.mlp import GatedMLP
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.norm import RMSNorm
from halfbyte.model_runner.layers.rotary import RotaryTables

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.program import Program


class Gemma3Layer(DecoderLayer):
    """Norms before and after both attention and MLP; the outer ones act on what is added."""

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend) -> None:
        super().__init__()
        size, eps, unit_offset = config.hidden_size, config.rms_norm_eps, config.norm_unit_offset
        self.input_layernorm = RMSNorm(size, eps, unit_offset)
        self.self_attn = Attention(config, layer, backend)
        self.post_attention_layernorm = RMSNorm(size, eps, unit_offset)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, unit_offset)
        self.mlp = GatedMLP(config)
        self.post_feedforward_layernorm = RMSNorm(size, eps, unit_offset)

    def forward(self, x_TE: Tensor, rotary: RotaryTables, context: ForwardContext) -> Tensor:
        attended_TE = self.self_attn(self.input_layernorm(x_TE), rotary, context)
        x_TE, normed_TE = self.pre_feedforward_layernorm.after_sum(x_TE, self.post_attention_layernorm(attended_TE))
        fed_TE = self.mlp(normed_TE, context)
        return x_TE + self.post_feedforward_layernorm(fed_TE)

    def record(self, program: Program, x: int, rotation: int, context: ForwardContext) -> None:
        size = self.input_layernorm.weight.shape[0]
        normed, added = program.buffer("normed", size), program.buffer("added", size)
        self.input_layernorm.record(program, x, normed)
        self.self_attn.record(program, normed, rotation, context, added)
        self.post_attention_layernorm.record(program, added, x, adds=True)
        self.pre_feedforward_layernorm.record(program, x, normed)
        self.mlp.record(program, normed, added)
        self.post_feedforward_layernorm.record(program, added, x, adds=True)


class Gemma3ForCausalLM(Model):
    """Layers with a window rotate with `local_rope`, the others with `rope`."""

    def make_layer(self, layer: int) -> DecoderLayer:
        return Gemma3Layer(self.config, layer, self.backend)

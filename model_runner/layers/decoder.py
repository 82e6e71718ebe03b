"""The decoder layer that most families share: norm, attention, add; norm, MLP, add. Called by the models that use it.

Shape letters: T tokens, E hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from halfbyte.kernels.attention.base import AttentionBackend
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.layers.attention import Attention
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.mlp import GatedMLP
from halfbyte.model_runner.layers.norm import RMSNorm
from halfbyte.model_runner.layers.rotary import RotaryTables

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.program import Program


class DecoderLayer(nn.Module):
    """What a model stacks: one layer, as PyTorch and as operations of a program. Both change x in the same way."""

    def forward(self, x_TE: Tensor, rotary: RotaryTables, context: ForwardContext) -> Tensor:
        raise NotImplementedError

    def record(self, program: Program, x: int, rotation: int, context: ForwardContext) -> None:
        """Adds the operations that change buffer `x` in place; rotation: the buffer of the layer's rotary tables."""
        raise NotImplementedError


class PreNormLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)). The sums are in the model's dtype."""

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_unit_offset)
        self.self_attn = Attention(config, layer, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_unit_offset)
        self.mlp = GatedMLP(config)

    def forward(self, x_TE: Tensor, rotary: RotaryTables, context: ForwardContext) -> Tensor:
        attended_TE = self.self_attn(self.input_layernorm(x_TE), rotary, context)
        x_TE, normed_TE = self.post_attention_layernorm.after_sum(x_TE, attended_TE)
        return x_TE + self.mlp(normed_TE, context)

    def record(self, program: Program, x: int, rotation: int, context: ForwardContext) -> None:
        normed = program.buffer("normed", self.input_layernorm.weight.shape[0])
        self.input_layernorm.record(program, x, normed)
        self.self_attn.record(program, normed, rotation, context, x, adds=True)
        self.post_attention_layernorm.record(program, x, normed)
        self.mlp.record(program, normed, x, adds=True)

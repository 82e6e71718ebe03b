"""Self-attention of a decoder layer: projections, optional q/k norms, rotation; the back end does the rest.

Knows its layer's index, so that it finds its cache and metadata in the context. Called by decoder layers.

Shape letters: T tokens, E hidden, H heads, G kv heads, N = H + G, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.kernels.attention.base import AttentionBackend, AttentionSpec
from halfbyte.kernels.norm import HeadNorms
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.linear import Linear
from halfbyte.model_runner.layers.norm import RMSNorm
from halfbyte.model_runner.layers.rotary import RotaryTables
from halfbyte.model_runner.layers.weights import KernelModule

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.program import Program


def attention_spec(config: DecoderConfig, layer: int) -> AttentionSpec:
    """What layer `layer` asks of an attention back end."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        head_dim_v=config.head_dim,
        scale=config.attention_scale,
        sliding_window=config.layer_windows[layer],
        soft_cap=config.attn_soft_cap,
    )


class Attention(KernelModule):
    """Rotary attention with grouped kv heads over the paged cache."""

    def __init__(self, config: DecoderConfig, layer: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.layer = layer
        self.backend = backend
        self.spec = attention_spec(config, layer)
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shards = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv_proj = Linear(config.hidden_size, shards, bias=config.attention_bias)
        self.o_proj = Linear(query, {"o_proj": config.hidden_size}, bias=config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_unit_offset)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, config.norm_unit_offset)

    def forward(self, x_TE: Tensor, rotary: RotaryTables, context: ForwardContext) -> Tensor:
        num_heads, num_kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv_TND = self.qkv_proj(x_TE, context.seat_T).unflatten(-1, (-1, self.spec.head_dim))
        qk_TND, v_TGD = qkv_TND.split((num_heads + num_kv_heads, num_kv_heads), 1)
        q_THD, k_TGD = self.kernels.rotate(qk_TND, *rotary, self._head_norms).split((num_heads, num_kv_heads), 1)
        out_THD = context.attend(self, q_THD, k_TGD, v_TGD)
        out_TE: Tensor = self.o_proj(out_THD.flatten(1), context.seat_T)
        return out_TE

    @property
    def _head_norms(self) -> HeadNorms | None:
        q, k = self.q_norm, self.k_norm
        return None if q is None or k is None else HeadNorms(q.weight, k.weight, self.spec.num_heads, q.eps, q.unit_offset)

    def record(self, program: Program, x: int, rotation: int, context: ForwardContext, out: int, *, adds: bool = False) -> None:
        spec = self.spec
        qkv = program.buffer("qkv", (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.head_dim_v)
        heads = program.buffer("heads", spec.num_heads * spec.head_dim_v)
        self.qkv_proj.record(program, x, qkv)
        program.attention(
            qkv,
            heads,
            rotation,
            spec,
            context.caches[self.layer],
            context.group_of_layer[self.layer],
            q_norm_D=None if self.q_norm is None else self.q_norm.factors,
            k_norm_D=None if self.k_norm is None else self.k_norm.factors,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
        )
        self.o_proj.record(program, heads, out, adds=adds)

"""ModernBERT: a pre-norm encoder with rotary positions, gated MLPs, and layers that see only what is near.

Shape letters: T tokens, E hidden, H heads, D head dim, I intermediate.
"""

from __future__ import annotations

from torch import Tensor, nn

from halfbyte.kernels.encoder_attention import attend_texts
from halfbyte.kernels.rope import inverse_frequencies, rotary_tables, rotate
from halfbyte.model_runner.encoder_config import EncoderConfig
from halfbyte.model_runner.layers.encoder import ENCODER_ACTIVATIONS, Encoder, LayerNorm, Table, Texts
from halfbyte.model_runner.layers.linear import Linear

RotaryTables = tuple[Tensor, Tensor]


class _Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tok_embeddings = Table(config.vocab_size, config.hidden_size)
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, has_bias=config.norm_bias)

    def forward(self, texts: Texts) -> Tensor:
        out_TE: Tensor = self.norm(self.tok_embeddings(texts.token_ids_T))
        return out_TE


class _Attention(nn.Module):
    def __init__(self, config: EncoderConfig, reach: int | None) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.attention_bias
        self.qkv = Linear(size, {"Wqkv": 3 * size}, bias=bias)
        self.out = Linear(size, {"Wo": size}, bias=bias)
        self._head_dim = config.head_dim
        self._reach = reach

    def forward(self, x_TE: Tensor, rotary: RotaryTables, texts: Texts) -> Tensor:
        q_THD, k_THD, v_THD = (part.unflatten(-1, (-1, self._head_dim)) for part in self.qkv(x_TE).chunk(3, dim=-1))
        q_THD, k_THD = rotate(q_THD, *rotary), rotate(k_THD, *rotary)
        out_TE: Tensor = self.out(attend_texts(q_THD, k_THD, v_THD, texts.places, self._reach).flatten(1))
        return out_TE


class _GatedMLP(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.both = Linear(config.hidden_size, {"Wi": 2 * inner}, bias=bias)
        self.out = Linear(inner, {"Wo": config.hidden_size}, bias=bias)
        self._activation = ENCODER_ACTIVATIONS[config.hidden_act]

    def forward(self, x_TE: Tensor) -> Tensor:
        input_TI, gate_TI = self.both(x_TE).chunk(2, dim=-1)
        out_TE: Tensor = self.out(self._activation(input_TI) * gate_TI)
        return out_TE


class _Layer(nn.Module):
    def __init__(self, config: EncoderConfig, index: int) -> None:
        super().__init__()
        size, eps, bias = config.hidden_size, config.norm_eps, config.norm_bias
        # the embeddings are normalised already
        self.attn_norm = LayerNorm(size, eps, has_bias=bias) if index else None
        self.attn = _Attention(config, config.layer_reaches[index])
        self.mlp_norm = LayerNorm(size, eps, has_bias=bias)
        self.mlp = _GatedMLP(config)

    def forward(self, x_TE: Tensor, rotary: RotaryTables, texts: Texts) -> Tensor:
        normed_TE = x_TE if self.attn_norm is None else self.attn_norm(x_TE)
        x_TE = x_TE + self.attn(normed_TE, rotary, texts)
        return x_TE + self.mlp(self.mlp_norm(x_TE))


class ModernBertEncoder(Encoder):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_layers))
        self.final_norm = LayerNorm(config.hidden_size, config.norm_eps, has_bias=config.norm_bias)

    def forward(self, texts: Texts) -> Tensor:
        x_TE: Tensor = self.embeddings(texts)
        assert self.config.thetas is not None, "this family rotates"
        full, local = (self._rotary(texts, theta, x_TE) for theta in self.config.thetas)
        for layer, reach in zip(self.layers, self.config.layer_reaches, strict=True):
            x_TE = layer(x_TE, full if reach is None else local, texts)
        out_TE: Tensor = self.final_norm(x_TE)
        return out_TE

    def _rotary(self, texts: Texts, theta: float, like: Tensor) -> RotaryTables:
        frequencies_F, factor = inverse_frequencies(self.config.head_dim, theta)
        return rotary_tables(texts.positions_T, frequencies_F.to(like.device), factor, like.dtype)

"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: one post-norm encoder with learned positions.

RoBERTa's positions begin behind that of its padding token; DistilBERT has other names and no token types.

Shape letters: T tokens, E hidden, H heads, D head dim.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from halfbyte.kernels.encoder_attention import attend_texts
from halfbyte.model_runner.encoder_config import EncoderConfig
from halfbyte.model_runner.layers.encoder import ENCODER_ACTIVATIONS, Encoder, LayerNorm, Table, Texts
from halfbyte.model_runner.layers.linear import Linear


class _Embeddings(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.word_embeddings = Table(config.vocab_size, size)
        self.position_embeddings = Table(config.max_position + config.position_offset, size)
        self.token_type_embeddings = Table(config.num_types, size) if config.num_types else None
        self.LayerNorm = LayerNorm(size, config.norm_eps)
        self._offset = config.position_offset

    def forward(self, texts: Texts) -> Tensor:
        x_TE = self.word_embeddings(texts.token_ids_T)
        if self.token_type_embeddings is not None:
            types_T = texts.types_T if self.token_type_embeddings.weight.shape[0] > 1 else texts.types_T * 0
            x_TE = x_TE + self.token_type_embeddings(types_T)
        out_TE: Tensor = self.LayerNorm(x_TE + self.position_embeddings(texts.positions_T + self._offset))
        return out_TE


class _SelfAttention(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.qkv = Linear(size, {"query": size, "key": size, "value": size}, bias=True)
        self._head_dim = config.head_dim

    def forward(self, x_TE: Tensor, texts: Texts) -> Tensor:
        q_THD, k_THD, v_THD = (part.unflatten(-1, (-1, self._head_dim)) for part in self.qkv(x_TE).chunk(3, dim=-1))
        return attend_texts(q_THD, k_THD, v_THD, texts.places).flatten(1)


class _Output(nn.Module):
    """A linear layer, the sum with what was before, and a norm."""

    def __init__(self, num_inputs: int, config: EncoderConfig) -> None:
        super().__init__()
        self.projection = Linear(num_inputs, {"dense": config.hidden_size}, bias=True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, inner_TE: Tensor, x_TE: Tensor) -> Tensor:
        out_TE: Tensor = self.LayerNorm(self.projection(inner_TE) + x_TE)
        return out_TE


class _Attention(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _Output(config.hidden_size, config)


class _Intermediate(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.projection = Linear(config.hidden_size, {"dense": config.intermediate_size}, bias=True)
        self._activation = ENCODER_ACTIVATIONS[config.hidden_act]

    def forward(self, x_TE: Tensor) -> Tensor:
        return self._activation(self.projection(x_TE))


class _Layer(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _Intermediate(config)
        self.output = _Output(config.intermediate_size, config)

    def forward(self, x_TE: Tensor, texts: Texts) -> Tensor:
        x_TE = self.attention.output(self.attention.self(x_TE, texts), x_TE)
        out_TE: Tensor = self.output(self.intermediate(x_TE), x_TE)
        return out_TE


class _Stack(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))


class BertEncoder(Encoder):
    """Post-norm layers on the sum of word, type and position."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.encoder = _Stack(config)

    def forward(self, texts: Texts) -> Tensor:
        x_TE: Tensor = self.embeddings(texts)
        for layer in self.encoder.layer:
            x_TE = layer(x_TE, texts)
        return x_TE

    @staticmethod
    def checkpoint_name(name: str) -> str:
        """Without the prefix of models with a head; old checkpoints call a norm's weight gamma, and its bias beta."""
        name = re.sub(r"^(bert|roberta)\.", "", name)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


_DISTILBERT_NAMES = {
    "transformer.layer": "encoder.layer",
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}


class DistilBertEncoder(BertEncoder):
    @staticmethod
    def checkpoint_name(name: str) -> str:
        name = name.removeprefix("distilbert.")
        for own, common in _DISTILBERT_NAMES.items():
            name = name.replace(own, common)
        return name

"""`Model`: a decoder-only language model over a ragged batch of tokens. Families differ in the layer they stack.

Knows configuration, layers and the forward context; knows nothing of requests, sampling or files. Made by the loader, run by
the runner.

Shape letters: T tokens, N rows that want logits, E hidden, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from halfbyte.kernels.attention.base import AttentionBackend, AttentionSpec
from halfbyte.kernels.cpu.program import Program, RotaryInput
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.layers.attention import attention_spec
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.decoder import DecoderLayer
from halfbyte.model_runner.layers.embedding import Embedding
from halfbyte.model_runner.layers.norm import RMSNorm
from halfbyte.model_runner.layers.rotary import Rotary
from halfbyte.model_runner.layers.weights import LoadReport, load_weights, weight_bytes


class Model(nn.Module):
    """Embedding, layers, final norm, head. A family overrides `make_layer`; module names are those of its checkpoints."""

    def __init__(self, config: DecoderConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.embed_scale)
        self.layers = nn.ModuleList(self.make_layer(layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_unit_offset)
        self.lm_head = None if config.tie_embeddings else Embedding(config.vocab_size, config.hidden_size)
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.rotaries = nn.ModuleList(Rotary(rope, config.head_dim) for rope in ropes)
        self.rotary_of_layer = [0 if window is None else len(ropes) - 1 for window in config.layer_windows]

    def make_layer(self, layer: int) -> DecoderLayer:
        """The decoder layer number `layer`."""
        raise NotImplementedError

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: ForwardContext) -> Tensor:
        """Hidden states after the final norm. Writes the tokens' K and V into the caches of `context`."""
        x_TE: Tensor = self.embed_tokens(token_ids_T)
        tables = [rotary(positions_T, x_TE.dtype) for rotary in self.rotaries]
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            x_TE = layer(x_TE, tables[rotary], context)
        out_TE: Tensor = self.norm(x_TE)
        return out_TE

    def record(self, program: Program, context: ForwardContext, dtype: torch.dtype, out: int) -> None:
        """`forward` as operations of `program`; dtype: the one that the checkpoint's scale of embeddings is rounded to."""
        x = program.buffer("x", self.config.hidden_size)
        program.embed(self.embed_tokens.matrices[0], x, self.embed_tokens.rounded_scale(dtype))
        rotations = [program.buffer(f"rotary {i}", self.config.head_dim) for i in range(len(self.rotaries))]
        for index, rotation in enumerate(rotations):
            program.rotary(index, rotation)
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            assert isinstance(layer, DecoderLayer)
            layer.record(program, x, rotations[rotary], context)
        self.norm.record(program, x, out)

    def rotary_inputs(self, positions_T: Tensor) -> list[RotaryInput]:
        """The frequencies that a program needs, in the order of `rotaries`."""
        rotaries = [rotary for rotary in self.rotaries if isinstance(rotary, Rotary)]
        return [RotaryInput(rotary.frequencies(positions_T), rotary.attention_factor) for rotary in rotaries]

    @property
    def head(self) -> Embedding:
        """The matrix whose rows score the tokens."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def compute_logits(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N, V] for the given rows only."""
        return self.cap_logits(self.head.logits(hidden_NE))

    def cap_logits(self, logits_NV: Tensor) -> Tensor:
        cap = self.config.final_soft_cap
        return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        return weight_bytes(self)

    def attention_specs(self) -> list[AttentionSpec]:
        """What each layer asks of the attention back end and, through it, of the cache."""
        return [attention_spec(self.config, layer) for layer in range(self.config.num_layers)]

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """Writes checkpoint tensors, named as Hugging Face names them, into the parameters."""
        return load_weights(self, tensors)

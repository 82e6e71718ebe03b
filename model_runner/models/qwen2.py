"""Qwen2 and Qwen2.5: Llama's layers with biases on q, k and v, and sliding windows on the upper layers where configured."""

from __future__ import annotations

from halfbyte.model_runner.layers.decoder import DecoderLayer, PreNormLayer
from halfbyte.model_runner.layers.model import Model


class Qwen2ForCausalLM(Model):
    """The configuration sets `attention_bias`."""

    def make_layer(self, layer: int) -> DecoderLayer:
        assert self.config.attention_bias, "Qwen2 checkpoints have q, k and v biases"
        return PreNormLayer(self.config, layer, self.backend)

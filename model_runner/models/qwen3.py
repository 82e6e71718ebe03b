"""Qwen3 (dense): Llama's layers with RMS norms on each head's q and k before rotation, and a head dim of its own."""

from __future__ import annotations

from halfbyte.model_runner.layers.decoder import DecoderLayer, PreNormLayer
from halfbyte.model_runner.layers.model import Model


class Qwen3ForCausalLM(Model):
    """The configuration sets `qk_norm`."""

    def make_layer(self, layer: int) -> DecoderLayer:
        assert self.config.qk_norm, "Qwen3 checkpoints have q and k norms"
        return PreNormLayer(self.config, layer, self.backend)

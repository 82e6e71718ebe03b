"""Llama and the families that share its architecture: SmolLM2, Mistral (the same with a sliding window).

Rotary position embedding with any of the supported scalings, grouped kv heads, gated SiLU MLP, no biases unless the
configuration asks for them.
"""

from __future__ import annotations

from halfbyte.model_runner.layers.decoder import DecoderLayer, PreNormLayer
from halfbyte.model_runner.layers.model import Model


class LlamaForCausalLM(Model):
    """Pre-norm decoder layers, exactly as the configuration describes them."""

    def make_layer(self, layer: int) -> DecoderLayer:
        return PreNormLayer(self.config, layer, self.backend)

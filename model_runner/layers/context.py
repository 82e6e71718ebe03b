"""What a forward pass needs beside tokens and positions: the step's attention metadata and the layers' caches.

Made by the runner once per step and passed down as an argument; layers read it and keep nothing. Whoever wants to do something
else where layers attend (`device_graphs` does) overrides `attend`.

Shape letters: T tokens, H heads, G kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from halfbyte.kernels.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from halfbyte.kvcache.tensors import LayerCache


class AttentionLayer(Protocol):
    """A layer that attends: its number in the model, what it asks, and who computes it."""

    layer: int
    spec: AttentionSpec
    backend: AttentionBackend


@dataclass(slots=True)
class ForwardContext:
    """metadata: one per KV group, prepared by the back end. caches: one per layer. group_of_layer: layer -> group.

    seat_T: where each token's adapter sits, int32, 0 for none; None: no token of the step has one.
    """

    metadata: list[AttentionMetadata]
    caches: list[LayerCache]
    group_of_layer: list[int]
    seat_T: Tensor | None = field(default=None, kw_only=True)

    def attend(self, layer: AttentionLayer, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Write the layer's K and V, and attend to what is cached: out_THD, with the head dim of v."""
        metadata = self.metadata[self.group_of_layer[layer.layer]]
        return layer.backend.forward(q_THD, k_TGD, v_TGD, self.caches[layer.layer], metadata, layer.spec)

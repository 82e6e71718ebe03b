"""What a forward pass needs beside tokens and positions: the step's attention metadata and the layers' caches.

Made by the runner once per step and passed down as an argument; layers read it and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.attention.base import AttentionMetadata
from halfbyte.kvcache.tensors import LayerCache


@dataclass(slots=True)
class ForwardContext:
    """metadata: one per KV group, prepared by the back end. caches: one per layer. group_of_layer: layer -> group."""

    metadata: list[AttentionMetadata]
    caches: list[LayerCache]
    group_of_layer: list[int]

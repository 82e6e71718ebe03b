"""What one layer's KV cache is, and how layers share one pool of blocks.

Pure arithmetic on small frozen values; knows no torch, no memory and no requests. Formats (`kvcache/formats`) say which
planes a block has; `make_layout` groups the layers so that any block id can serve any group; sizing, the block pool's
manager, the tensors and the runner read the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

_ITEM_BYTES = {
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a block, for one layer: "k", "v" or scales. `shape` is that of one block; `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The KV cache of one layer. sliding_window w: a token at position p attends to p - w + 1 .. p; None: to all before it."""

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    block_size: int
    sliding_window: int | None
    format: str


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind that share a block table. `layers[i]` (the model's layer index) uses cache position i."""

    layers: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How all layers share one pool: block b of group g is the bytes of block b at positions 0 .. len(g.layers) - 1.

    num_positions: layers per group, the longest counts. page_bytes: one block at one position (the widest kind counts).
    block_bytes: one block at all positions. block_size: tokens per block, the same in all groups.
    """

    groups: tuple[KVGroup, ...]
    num_positions: int
    page_bytes: int
    block_bytes: int
    block_size: int

    @property
    def group_of_layer(self) -> list[int]:
        """For each layer of the model, the index of its group."""
        owner = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        return [owner[layer] for layer in range(len(owner))]


def make_layout(specs: Sequence[KVCacheSpec], page_bytes: Callable[[KVCacheSpec], int]) -> KVLayout:
    """Group the layers; `specs[i]` is layer i, `page_bytes` the bytes of one block of one layer.

    Layers with equal specs are of one kind. The group size is the smallest kind's layer count, or the largest's when that is
    less than half as much again (a few unused pages cost less than twice the block tables). A kind's layers are dealt out
    evenly over its groups. Full attention comes first, then kinds in the order of their first layer.
    """
    assert specs, "a model needs at least one layer with a KV cache"
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    assert len({spec.block_size for spec in kinds}) == 1, "all layers share one block size"
    counts = [len(layers) for layers in kinds.values()]
    group_size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups = []
    for spec, layers in sorted(kinds.items(), key=lambda kind: kind[0].sliding_window is not None):
        num_groups = -(-len(layers) // group_size)
        groups += [KVGroup(tuple(layers[i::num_groups]), spec) for i in range(num_groups)]
    num_positions = max(len(group.layers) for group in groups)
    widest_bytes = max(page_bytes(spec) for spec in kinds)
    return KVLayout(tuple(groups), num_positions, widest_bytes, num_positions * widest_bytes, specs[0].block_size)

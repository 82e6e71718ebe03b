"""K and V as plain floating-point numbers: bfloat16, float16 or float32, no scales.

A block is a K plane and a V plane, both head-major (G, S, D): one kv head's tokens of a block lie side by side, which is
what a tile reader wants.

Shape letters: T tokens, R requests, L positions read, G kv heads, D head dim, B blocks, S block size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform


class DenseFormat:
    """K and V cast to the torch dtype called `name`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        return (
            Plane("k", self.name, (spec.num_kv_heads, spec.block_size, spec.head_dim)),
            Plane("v", self.name, (spec.num_kv_heads, spec.block_size, spec.head_dim_v)),
        )

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        return None

    def write(self, k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        # A skipped row becomes a zero at slot 0, which is zero anyway. Selecting the other rows instead would make the
        # number of rows depend on tensor values, which costs a device synchronisation per layer.
        skipped_T = slot_mapping_T < 0
        slots_T = slot_mapping_T.clamp(min=0)
        block_T, offset_T = _split(slots_T, cache)
        for plane_BGSD, x_TGD in ((cache.planes["k"], k_TGD), (cache.planes["v"], v_TGD)):
            plane_BGSD[block_T, :, offset_T] = x_TGD.to(plane_BGSD.dtype).masked_fill(skipped_T[:, None, None], 0)

    def read(self, cache: LayerCache, slots_RL: Tensor) -> tuple[Tensor, Tensor]:
        block_RL, offset_RL = _split(slots_RL, cache)
        return cache.planes["k"][block_RL, :, offset_RL], cache.planes["v"][block_RL, :, offset_RL]


def _split(slots: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor]:
    block_size = cache.spec.block_size
    block = torch.div(slots, block_size, rounding_mode="floor")
    return block, slots - block * block_size

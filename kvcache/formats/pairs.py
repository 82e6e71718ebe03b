"""bfloat16 K and V in the order in which products of the CPU kernels read them: an arrangement of `bfloat16`.

A block's K plane is (G, D / 2, S, 2): pair after pair of dimensions, the tokens side by side. Its V plane is (G, S / 2, D, 2):
pair after pair of tokens. Two neighbouring numbers make one 32-bit word, as the instructions for pairs of bfloat16 want.

Shape letters: T tokens, R requests, L positions read, G kv heads, D head dim, B blocks, S block size, P pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Rotation
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform


class PairFormat:
    """Holds the very numbers that `DenseFormat("bfloat16")` holds, in as many bytes."""

    sides = None
    rotations: tuple[Rotation, Rotation] = ("none", "none")
    first_tokens = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        return (
            Plane("k", "bfloat16", (spec.num_kv_heads, spec.head_dim // 2, spec.block_size, 2)),
            Plane("v", "bfloat16", (spec.num_kv_heads, spec.block_size // 2, spec.head_dim_v, 2)),
        )

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if spec.head_dim % 2 or spec.block_size % 2:
            return Refusal(f"{self.name} holds pairs: head dim {spec.head_dim} and block size {spec.block_size} must be even", "")
        return None

    def write(self, k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        # A skipped token becomes a zero at slot 0, as in DenseFormat.
        skipped_T11 = (slot_mapping_T < 0)[:, None, None]
        block_T, offset_T = cache.places(slot_mapping_T.clamp(min=0))
        k_BSGP2, v_BPSGD = _by_token(cache)
        k_BSGP2[block_T, offset_T] = k_TGD.to(torch.bfloat16).masked_fill(skipped_T11, 0).unflatten(-1, (-1, 2))
        v_BPSGD[block_T, offset_T // 2, offset_T % 2] = v_TGD.to(torch.bfloat16).masked_fill(skipped_T11, 0)

    def read(self, cache: LayerCache, slots_RL: Tensor) -> tuple[Tensor, Tensor]:
        block_RL, offset_RL = cache.places(slots_RL)
        k_BSGP2, v_BPSGD = _by_token(cache)
        return k_BSGP2[block_RL, offset_RL].flatten(-2), v_BPSGD[block_RL, offset_RL // 2, offset_RL % 2]


def _by_token(cache: LayerCache) -> tuple[Tensor, Tensor]:
    """Views whose first dimensions name a token: K [B, S, G, P, 2], V [B, S / 2, 2, G, D]."""
    return cache.planes["k"].permute(0, 3, 1, 2, 4), cache.planes["v"].permute(0, 2, 4, 1, 3)

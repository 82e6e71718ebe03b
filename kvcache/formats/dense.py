"""K and V as plain floating-point numbers: bfloat16, float16 or float32, no scales.

`DenseFormat` holds both sides so; `DenseCodec` is one side of a format whose other side is something else.

A block is a K plane and a V plane, both head-major (G, S, D): one kv head's tokens of a block lie side by side, which is
what a tile reader wants.

Shape letters: T tokens, R requests, L positions read, G kv heads, D head dim, B blocks, S block size, U rows per vector.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Rotation, Side
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform


class DenseFormat:
    """K and V cast to the torch dtype called `name`."""

    rotations: tuple[Rotation, Rotation] = ("none", "none")
    first_tokens = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.sides = (Side(DenseCodec(name)), Side(DenseCodec(name)))

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        return (
            Plane("k", self.name, (spec.num_kv_heads, spec.block_size, spec.head_dim)),
            Plane("v", self.name, (spec.num_kv_heads, spec.block_size, spec.head_dim_v)),
        )

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        return None

    def write(self, k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        # A skipped token becomes a zero at slot 0, which is zero anyway. Selecting the other tokens instead would make a
        # shape depend on tensor values, which costs a device synchronisation per layer.
        skipped_T11 = (slot_mapping_T < 0)[:, None, None]
        slots_T = slot_mapping_T.clamp(min=0)
        for plane_BGSD, x_TGD in ((cache.planes["k"], k_TGD), (cache.planes["v"], v_TGD)):
            rows, index_TGU = _rows(plane_BGSD, slots_T[:, None])
            x_TGD = x_TGD.to(plane_BGSD.dtype).masked_fill(skipped_T11, 0)
            rows.index_copy_(0, index_TGU.flatten(), x_TGD.reshape(-1, rows.shape[1]))

    def read(self, cache: LayerCache, slots_RL: Tensor) -> tuple[Tensor, Tensor]:
        return _gather(cache.planes["k"], slots_RL), _gather(cache.planes["v"], slots_RL)


class DenseCodec:
    """Numbers cast to the torch dtype called `name`; their bits are the codes."""

    uses_scale = False
    extra_unit = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self._dtype = getattr(torch, name)
        self.bits = 8 * self._dtype.itemsize
        self._codes = {16: torch.int16, 32: torch.int32}[self.bits]

    def extra_bytes(self, dim: int) -> int:
        return 0

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        codes_D = x_D.to(self._dtype).view(self._codes)
        return codes_D, codes_D[..., :0].to(torch.uint8)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        return codes_D.contiguous().view(self._dtype).float()

    def refuse(self, dim: int) -> Refusal | None:
        return None


def _gather(plane_BGSD: Tensor, slots_RL: Tensor) -> Tensor:
    """The vectors at `slots_RL`, as RLGD. They lie in memory as RGLD, the order in which attention multiplies them."""
    rows, index_RGLU = _rows(plane_BGSD, slots_RL[:, None])
    (num_requests, length), num_kv_heads = slots_RL.shape, plane_BGSD.shape[1]
    return rows.index_select(0, index_RGLU.flatten()).view(num_requests, num_kv_heads, length, -1).transpose(1, 2)


def _rows(plane_BGSD: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The plane's memory as rows of equal width, and the rows that hold each slot's vectors.

    slots [..., 1, n] (or [T, 1]) broadcasts against the kv heads. Whole rows are copied about ten times faster than elements
    are indexed. A row is a whole vector unless K and V differ in head dim, when it is their greatest common part.
    """
    num_kv_heads, block_size, head_dim = plane_BGSD.shape[1:]
    block_stride, head_stride, token_stride, _ = plane_BGSD.stride()
    start = plane_BGSD.storage_offset()
    width = gcd(head_dim, gcd(block_stride, start))
    rows = plane_BGSD.as_strided((plane_BGSD.shape[0] * block_stride // width, width), (width, 1), 0)
    block = torch.div(slots, block_size, rounding_mode="floor")
    offset = slots - block * block_size
    heads = torch.arange(num_kv_heads, device=slots.device) * (head_stride // width) + start // width
    first = block * (block_stride // width) + offset * (token_stride // width)
    index = first + (heads[:, None] if slots.dim() == 3 else heads)
    if width == head_dim:
        return rows, index
    return rows, index[..., None] + torch.arange(head_dim // width, device=slots.device)

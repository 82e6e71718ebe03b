"""Formats made of two codecs: where the bytes of their vectors lie.

`PlanesFormat`: a block is K's codes, K's extra bytes, V's codes, V's extra bytes, each head-major (G, S, bytes). For NVFP4 this
is FlashInfer's page. `RecordsFormat`: each head of a token has one record, K's codes | extra | V's codes | extra, token-major
(S, G, bytes).

Shape letters: T tokens, R requests, L positions read, G kv heads, D head dim, B blocks, S block size, N bytes, E extra bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Rotation, Side
from halfbyte.kvcache.formats.numbers import pack, packed_bytes, unpack
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform


class CodedFormat:
    """K and V through a codec each. Subclasses say where the codes and the bytes beside them lie."""

    def __init__(self, name: str, k: Side, v: Side, *, first_tokens: int = 0) -> None:
        self.name = name
        self.k = k
        self.v = v
        self.first_tokens = first_tokens

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.k, self.v

    @property
    def rotations(self) -> tuple[Rotation, Rotation]:
        return self.k.rotation, self.v.rotation

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        raise NotImplementedError

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        for side, dim in ((self.k, spec.head_dim), (self.v, spec.head_dim_v)):
            if refusal := side.codec.refuse(dim):
                return refusal
            if side.rotation == "hadamard" and dim & (dim - 1):
                return Refusal(
                    f"{self.name} KV is turned by a Hadamard matrix, whose size is a power of two, got head dim {dim}",
                    "use --kv-cache-dtype nvfp4_4over6",
                )
        return None

    def write(self, k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        # A skipped token becomes zeros at slot 0, which holds zeros anyway: shapes must not depend on values.
        skipped_T11 = (slot_mapping_T < 0)[:, None, None]
        at = cache.places(slot_mapping_T.clamp(min=0))
        for side, prefix, x_TGD, scale_G in (
            (self.k, "k", k_TGD, cache.scales.k_G),
            (self.v, "v", v_TGD, cache.scales.v_G),
        ):
            codes_TGD, extra_TGE = side.codec.encode(x_TGD.float(), scale_G[:, None])
            self.put(cache, prefix, at, codes_TGD.masked_fill(skipped_T11, 0), extra_TGE.masked_fill(skipped_T11, 0))

    def read(self, cache: LayerCache, slots_RL: Tensor) -> tuple[Tensor, Tensor]:
        at = cache.places(slots_RL)
        k_RLGD = self.k.codec.decode(*self.get(cache, "k", at), cache.scales.k_G[:, None])
        return k_RLGD, self.v.codec.decode(*self.get(cache, "v", at), cache.scales.v_G[:, None])

    def put(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor], codes_TGD: Tensor, extra_TGE: Tensor) -> None:
        """Store the codes and extra bytes of side `prefix` at (block, offset)."""
        raise NotImplementedError

    def get(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What `put` stored: codes [..., G, D], extra [..., G, E]."""
        raise NotImplementedError

    def _each(self, spec: KVCacheSpec) -> tuple[tuple[str, Side, int], ...]:
        return ("k", self.k, spec.head_dim), ("v", self.v, spec.head_dim_v)


class PlanesFormat(CodedFormat):
    """Codes of all heads and tokens of a block, then their extra bytes; K before V."""

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        found = []
        for prefix, side, dim in self._each(spec):
            place = (spec.num_kv_heads, spec.block_size)
            found.append(Plane(prefix, "uint8", (*place, packed_bytes(side.codec.bits, dim))))
            if extra := side.codec.extra_bytes(dim):
                found.append(Plane(f"{prefix}_extra", "uint8", (*place, extra)))
        return tuple(found)

    def put(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor], codes_TGD: Tensor, extra_TGE: Tensor) -> None:
        block_T, offset_T = at
        side = self.k if prefix == "k" else self.v
        cache.planes[prefix].transpose(1, 2)[block_T, offset_T] = pack(codes_TGD, side.codec.bits)
        if extra_TGE.shape[-1]:
            cache.planes[f"{prefix}_extra"].transpose(1, 2)[block_T, offset_T] = extra_TGE

    def get(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        side, dim = (self.k, cache.spec.head_dim) if prefix == "k" else (self.v, cache.spec.head_dim_v)
        data = cache.planes[prefix].transpose(1, 2)[at]
        extra_plane = cache.planes.get(f"{prefix}_extra")
        extra = data[..., :0] if extra_plane is None else extra_plane.transpose(1, 2)[at]
        return unpack(data, side.codec.bits, dim), extra


class RecordsFormat(CodedFormat):
    """One record per token and head. even: records have an even number of bytes."""

    def __init__(self, name: str, k: Side, v: Side, *, even: bool = False) -> None:
        super().__init__(name, k, v)
        self._even = even

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        size = self._starts(spec)[-1]
        size += size % 2 if self._even else 0
        return (Plane("kv", "uint8", (spec.block_size, spec.num_kv_heads, size)),)

    def put(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor], codes_TGD: Tensor, extra_TGE: Tensor) -> None:
        side = self.k if prefix == "k" else self.v
        record_TGN = torch.cat((pack(codes_TGD, side.codec.bits), extra_TGE), -1)
        first = self._starts(cache.spec)[0 if prefix == "k" else 2]
        block_T, offset_T = at
        cache.planes["kv"][..., first : first + record_TGN.shape[-1]][block_T, offset_T] = record_TGN

    def get(self, cache: LayerCache, prefix: str, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        starts = self._starts(cache.spec)
        side, dim = (self.k, cache.spec.head_dim) if prefix == "k" else (self.v, cache.spec.head_dim_v)
        first, middle, end = starts[:3] if prefix == "k" else starts[2:]
        record = cache.planes["kv"][at]
        return unpack(record[..., first:middle], side.codec.bits, dim), record[..., middle:end]

    def _starts(self, spec: KVCacheSpec) -> list[int]:
        """Where K's codes, K's extra, V's codes and V's extra begin, and where they end."""
        starts = [0]
        for _, side, dim in self._each(spec):
            starts.append(starts[-1] + packed_bytes(side.codec.bits, dim))
            starts.append(starts[-1] + side.codec.extra_bytes(dim))
        return starts

"""The records of multi-head latent attention (MLA): a token has one latent of 512 numbers, which is K and V of all heads at once.

K is the latent and, where the model rotates positions, 64 rotated numbers behind it; V is the latent alone, so that nothing of V
is stored. Both records are those of FlashMLA's sparse kernels, whose models are bfloat16:
  fp8_ds_mla    656 bytes: latent as E4M3 | four float32 scales, one per 128 numbers | 64 bfloat16
  nvfp4_ds_mla  352 bytes: latent as E2M1 | 64 E4M3, scale 1 | 32 E4M3 scales, one per 16 numbers, in an order of their own
A model that rotates nothing has zeros in place of the 64 numbers.

Shape letters: T tokens, R requests, L positions read, D head dim, C latent, P rotated numbers, K blocks or tiles, N bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Rotation
from halfbyte.kvcache.formats.blocks import BLOCK, Nvfp4Codec
from halfbyte.kvcache.formats.numbers import E4M3_MAX, finite, from_e4m3, pack, to_e4m3, unpack
from halfbyte.kvcache.spec import KVCacheSpec, Plane

if TYPE_CHECKING:
    from halfbyte.kvcache.tensors import LayerCache
    from halfbyte.platform import Platform

LATENT = 512
ROTATED = 64
TILE = 128  # numbers that share a scale of fp8_ds_mla
_MIN_SCALE = torch.finfo(torch.float32).tiny


class Record(Protocol):
    """The bytes of one token."""

    num_bytes: int

    def encode(self, latent_C: Tensor, rotated_P: Tensor, scale_1: Tensor) -> Tensor:
        """float32 [..., 512] and [..., 64] -> uint8 [..., num_bytes]. scale: the layer's static one, as in `Codec`."""
        ...

    def decode(self, record_N: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        """What `encode` made, back as float32. A record of zeros is zeros."""
        ...


class Fp8Record:
    """Tile scales are the greatest magnitude over 448, at least the smallest normal float32. Needs no static scale."""

    num_bytes = LATENT + LATENT // TILE * 4 + ROTATED * 2

    def encode(self, latent_C: Tensor, rotated_P: Tensor, scale_1: Tensor) -> Tensor:
        x_K128 = finite(latent_C).unflatten(-1, (-1, TILE))
        own_K1 = (x_K128.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=_MIN_SCALE)
        codes_C = to_e4m3(x_K128 / own_K1).flatten(-2)
        return torch.cat((codes_C, own_K1.flatten(-2).view(torch.uint8), rotated_P.to(torch.bfloat16).view(torch.uint8)), -1)

    def decode(self, record_N: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        codes_C, own, rotated = record_N.split((LATENT, LATENT // TILE * 4, ROTATED * 2), -1)
        own_K1 = own.contiguous().view(torch.float32)[..., None]
        latent_C = (from_e4m3(codes_C.contiguous()).unflatten(-1, (-1, TILE)) * own_K1).flatten(-2)
        return latent_C, rotated.contiguous().view(torch.bfloat16).float()


class Nvfp4Record:
    """The latent as in `nvfp4`. Block k's scale is the byte 8 * (k % 4) + k // 4 of the scales."""

    num_bytes = LATENT // 2 + ROTATED + LATENT // BLOCK
    _codec = Nvfp4Codec("nvfp4")

    def encode(self, latent_C: Tensor, rotated_P: Tensor, scale_1: Tensor) -> Tensor:
        codes_C, scales_K = self._codec.encode(latent_C, scale_1)
        by_byte_K = scales_K.unflatten(-1, (-1, 4)).transpose(-1, -2).flatten(-2)
        return torch.cat((pack(codes_C, 4), to_e4m3(finite(rotated_P)), by_byte_K), -1)

    def decode(self, record_N: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        codes, rotated_P, by_byte_K = record_N.split((LATENT // 2, ROTATED, LATENT // BLOCK), -1)
        scales_K = by_byte_K.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)
        return self._codec.decode(unpack(codes, 4, LATENT), scales_K, scale_1), from_e4m3(rotated_P.contiguous())


class MlaFormat:
    """A block is one plane, record after record."""

    sides = None
    rotations: tuple[Rotation, Rotation] = ("none", "none")
    first_tokens = 0

    def __init__(self, name: str, record: Record) -> None:
        self.name = name
        self.record = record

    def planes(self, spec: KVCacheSpec) -> tuple[Plane, ...]:
        return (Plane("kv", "uint8", (spec.block_size, self.record.num_bytes)),)

    def refuse(self, spec: KVCacheSpec, platform: Platform) -> Refusal | None:
        if (spec.num_kv_heads, spec.head_dim_v) == (1, LATENT) and spec.head_dim in (LATENT, LATENT + ROTATED):
            return None
        wanted = f"1 kv head of {LATENT + ROTATED} or {LATENT} numbers with V of {LATENT}"
        got = f"{spec.num_kv_heads} of {spec.head_dim} and {spec.head_dim_v}"
        return Refusal(
            f"{self.name} KV is a record of multi-head latent attention ({wanted}), got {got}", "use --kv-cache-dtype fp8"
        )

    def write(self, k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """v_TGD is not looked at: it is the latent once more."""
        # A skipped token becomes zeros at slot 0, which holds zeros anyway: shapes must not depend on values.
        k_TD = k_TGD.squeeze(1).float()
        rotated_TP = k_TD[:, LATENT:] if k_TD.shape[1] > LATENT else k_TD.new_zeros(k_TD.shape[0], ROTATED)
        record_TN = self.record.encode(k_TD[:, :LATENT], rotated_TP, cache.scales.k_G)
        block_T, offset_T = cache.places(slot_mapping_T.clamp(min=0))
        cache.planes["kv"][block_T, offset_T] = record_TN.masked_fill((slot_mapping_T < 0)[:, None], 0)

    def read(self, cache: LayerCache, slots_RL: Tensor) -> tuple[Tensor, Tensor]:
        latent_RLC, rotated_RLP = self.record.decode(cache.planes["kv"][cache.places(slots_RL)], cache.scales.k_G)
        k_RLD = torch.cat((latent_RLC, rotated_RLP), -1)[..., : cache.spec.head_dim]
        return k_RLD[..., None, :], latent_RLC[..., None, :]


def make(name: str) -> MlaFormat:
    return MlaFormat(name, Fp8Record() if name == "fp8_ds_mla" else Nvfp4Record())

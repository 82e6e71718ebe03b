"""Blocks of 16 numbers that share an E4M3 scale, over one float32 scale per kv head: NVFP4 and whole numbers of 4 to 6 bits.

real = code * (block scale * scale). Whole-numbered codes are stored with an offset (code + 8, 16 or 32); their block scale may
be negative, which gives the longer side of two's complement to the side that needs it.

Shape letters: D numbers of a vector, K blocks of 16, S tokens of a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Side
from halfbyte.kvcache.formats.coded import PlanesFormat
from halfbyte.kvcache.formats.numbers import finite, fold_sum, from_e2m1, from_e4m3, to_e2m1, to_e4m3

BLOCK = 16


class BlockCodec:
    """What codes in blocks of 16 share. A subclass says which block scales may be tried, and what a code is."""

    name: str
    bits: int
    uses_scale = True
    extra_unit = 1

    def extra_bytes(self, dim: int) -> int:
        return dim // BLOCK

    def refuse(self, dim: int) -> Refusal | None:
        if dim % BLOCK:
            return Refusal(f"{self.name} KV has blocks of {BLOCK} numbers, got head dim {dim}", "use --kv-cache-dtype fp8")
        return None

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        """The candidate with the least squared error, summed in halves; the first of equals."""
        x_K16, scale_11 = finite(x_D).unflatten(-1, (-1, BLOCK)), scale_1[..., None]
        found = least = None
        for wanted_K1 in self._block_scales(x_K16, scale_11):
            scales_K1 = to_e4m3(wanted_K1)
            unit_K1 = from_e4m3(scales_K1) * scale_11
            codes_K16 = self._to_codes(x_K16 * torch.where(unit_K1 == 0, 0, 1 / unit_K1))
            error_K1 = fold_sum((x_K16 - self._from_codes(codes_K16) * unit_K1) ** 2)
            if found is None or least is None:
                found, least = (codes_K16, scales_K1), error_K1
                continue
            better_K1 = error_K1 < least
            found = torch.where(better_K1, codes_K16, found[0]), torch.where(better_K1, scales_K1, found[1])
            least = torch.where(better_K1, error_K1, least)
        assert found is not None
        return found[0].flatten(-2), found[1].flatten(-2)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        unit_K1 = (from_e4m3(extra_E.contiguous()) * scale_1)[..., None]
        return (self._from_codes(codes_D.unflatten(-1, (-1, BLOCK))) * unit_K1).flatten(-2)

    def _block_scales(self, x_K16: Tensor, scale_11: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def _to_codes(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _from_codes(self, codes: Tensor) -> Tensor:
        raise NotImplementedError


class Nvfp4Codec(BlockCodec):
    """E2M1 codes. `nvfp4` maps the greatest magnitude of a block to 6; `nvfp4_4over6` to 6 or to 4, whichever errs less."""

    bits = 4

    def __init__(self, name: str) -> None:
        self.name = name
        self._peaks = (6.0, 4.0) if name == "nvfp4_4over6" else (6.0,)

    def _block_scales(self, x_K16: Tensor, scale_11: Tensor) -> list[Tensor]:
        most_K1 = x_K16.abs().amax(-1, keepdim=True)
        return [most_K1 / (peak * scale_11) for peak in self._peaks]

    def _to_codes(self, x: Tensor) -> Tensor:
        return to_e2m1(x)

    def _from_codes(self, codes: Tensor) -> Tensor:
        return from_e2m1(codes)


class IntCodec(BlockCodec):
    """Whole numbers of `bits`. Block scales tried: the greatest magnitude a at the shorter side (7, 15, 31), or exactly at the
    longer side (8, 16, 32) with the sign that puts it there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bits = int(name.removeprefix("int"))
        self._half = 1 << (self.bits - 1)

    def _block_scales(self, x_K16: Tensor, scale_11: Tensor) -> list[Tensor]:
        least_K1, most_K1 = x_K16.amin(-1, keepdim=True), x_K16.abs().amax(-1, keepdim=True)
        signed_K1 = torch.where(least_K1 == -most_K1, most_K1, -most_K1)
        return [most_K1 / ((self._half - 1) * scale_11), signed_K1 / (self._half * scale_11)]

    def _to_codes(self, x: Tensor) -> Tensor:
        return (torch.round(x).clamp(-self._half, self._half - 1) + self._half).to(torch.uint8)

    def _from_codes(self, codes: Tensor) -> Tensor:
        return codes.float() - self._half


def swizzle_v_scales(scales_SK: Tensor) -> Tensor:
    """V's block scales of a head's page as trtllm-gen reads them on compute capability 10.x; other readers take them as they are.

    In each group of 4 tokens, one block's 4 scales lie side by side: token t's scale of block k is the number
    (t // 4) * 4K + 4k + t % 4 of the page. S and K are multiples of 4 (K: head dims of whole 64s). [..., S, K] -> [..., S, K].
    Source: `nvfp4_quantize_paged_kv_cache` of FlashInfer 0.7.
    """
    return scales_SK.unflatten(-2, (-1, 4)).transpose(-1, -2).reshape(scales_SK.shape)


def unswizzle_v_scales(scales_SK: Tensor) -> Tensor:
    """The inverse of `swizzle_v_scales`."""
    size, num_blocks = scales_SK.shape[-2:]
    return scales_SK.unflatten(-2, (size // 4, 4)).flatten(-2).unflatten(-1, (num_blocks, 4)).transpose(-1, -2).flatten(-3, -2)


def make(name: str) -> PlanesFormat:
    return PlanesFormat(name, Side(Nvfp4Codec(name)), Side(Nvfp4Codec(name)))

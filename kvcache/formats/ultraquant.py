"""`ultraquant_4bit`: E2M1 codes over a power of two per 32 numbers, K turned by a Hadamard matrix; ROCm's record.

A vector's exponents are biased bytes: e = floor(log2(0.156 * greatest magnitude) + 0.5), byte = e + 127. Codes are the nearest
levels, a tie goes to the smaller magnitude. A byte of 0 stands for zeros only.

Shape letters: D numbers of a vector, K blocks of 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Side
from halfbyte.kvcache.formats.coded import RecordsFormat
from halfbyte.kvcache.formats.numbers import E2M1, finite, from_e2m1

BLOCK = 32
_SHARE = 0.156
_SQRT_HALF = 0.70710678118654752  # log2(m) + 0.5 reaches the next whole number there, for m in [1/2, 1)


class UltraquantCodec:
    """4.25 bits per number."""

    name = "ultraquant_4bit"
    bits = 4
    uses_scale = False
    extra_unit = 1

    def extra_bytes(self, dim: int) -> int:
        return dim // BLOCK

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        x_K32 = finite(x_D).unflatten(-1, (-1, BLOCK))
        mantissa_K1, exponent_K1 = torch.frexp(x_K32.abs().amax(-1, keepdim=True) * _SHARE)
        power_K1 = exponent_K1 - (mantissa_K1 < _SQRT_HALF).to(torch.int32)
        bytes_K1 = torch.where(mantissa_K1 == 0, 0, (power_K1 + 127).clamp(0, 254)).to(torch.uint8)
        y_K32 = torch.where(bytes_K1 == 0, 0, x_K32 / _power_of_two(bytes_K1))
        middles = [(low + high) / 2 for low, high in zip(E2M1, E2M1[1:], strict=False)]
        magnitude_K32 = sum((y_K32.abs() > middle).to(torch.uint8) for middle in middles)
        assert isinstance(magnitude_K32, Tensor)
        codes_K32 = torch.where(bytes_K1 == 0, 0, magnitude_K32 | (torch.signbit(x_K32).to(torch.uint8) << 3))
        return codes_K32.flatten(-2), bytes_K1.flatten(-2)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        bytes_K1 = extra_E[..., None]
        unit_K1 = torch.where(bytes_K1 == 0, 0, _power_of_two(bytes_K1))
        return (from_e2m1(codes_D.unflatten(-1, (-1, BLOCK))) * unit_K1).flatten(-2)

    def refuse(self, dim: int) -> Refusal | None:
        if dim % BLOCK or dim & (dim - 1):
            reason = f"ultraquant_4bit KV needs a head dim that is a power of two of at least {BLOCK}, got {dim}"
            return Refusal(reason, "use --kv-cache-dtype nvfp4_4over6")
        return None


def _power_of_two(biased: Tensor) -> Tensor:
    """2 ** (byte - 127) for bytes 1 .. 254, exactly: the byte is the exponent of a float32."""
    return (biased.to(torch.int32) << 23).view(torch.float32)


def make(name: str) -> RecordsFormat:
    return RecordsFormat(name, Side(UltraquantCodec(), "hadamard"), Side(UltraquantCodec()))

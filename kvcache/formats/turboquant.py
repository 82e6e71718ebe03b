"""TurboQuant's codecs: 4-bit keys on the best codebook for normal numbers, and uniform 4-bit values.

A key (turned by a Hadamard matrix, so that its numbers are about normal) is n * u: u's numbers are coded with Lloyd-Max's
levels for N(0, 1/D), and beside them lies n over the length of the coded u, as float16 ("norm correction"). A value is
code * step + least, both float16.

Shape letters: D numbers of a vector, L levels.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Side
from halfbyte.kvcache.formats.coded import RecordsFormat
from halfbyte.kvcache.formats.fp8 import Fp8Codec
from halfbyte.kvcache.formats.numbers import finite, fold_sum

_HALF_MAX = 65504.0


@cache
def normal_levels(num_levels: int = 16) -> np.ndarray:
    """Lloyd-Max's levels for N(0, 1), float64, rising: each is the mean of what is nearest to it. 200 rounds at most, from evenly
    spaced ones within 3.5 sigma; integrals by trapezoids of 200 points."""
    found = np.linspace(-3.5, 3.5, num_levels)
    for _ in range(200):
        borders = np.concatenate([[-8.0], (found[1:] + found[:-1]) / 2, [8.0]])
        points = np.linspace(borders[:-1], borders[1:], 200)
        density = np.exp(-(points**2) / 2)
        means = np.trapezoid(points * density, points, axis=0) / np.trapezoid(density, points, axis=0)
        settled = np.abs(means - found).max() < 1e-10
        found = means
        if settled:
            break
    return (found - found[::-1]) / 2


class TurboKeyCodec:
    """`turboquant_4bit_nc` keys: 4 bits per number and 2 bytes."""

    name = "turboquant_4bit_key"
    bits = 4
    uses_scale = False
    extra_unit = 2

    def extra_bytes(self, dim: int) -> int:
        return 2

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        x_D = finite(x_D).clamp(-_HALF_MAX, _HALF_MAX)
        length_1 = torch.sqrt(fold_sum(x_D * x_D))
        unit_D = x_D / (length_1 + 1e-8)
        level_L = levels(x_D.shape[-1]).to(x_D.device)
        middles = (level_L[1:] + level_L[:-1]) / 2
        codes_D = torch.bucketize(unit_D.contiguous(), middles)
        coded_1 = torch.sqrt(fold_sum(level_L[codes_D] ** 2))
        norm_1 = (length_1 / coded_1).clamp(max=_HALF_MAX).to(torch.float16)
        return codes_D.to(torch.uint8), norm_1.view(torch.uint8)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        return levels(codes_D.shape[-1]).to(codes_D.device)[codes_D.long()] * extra_E.contiguous().view(torch.float16).float()

    def refuse(self, dim: int) -> Refusal | None:
        if dim & (dim - 1):
            return Refusal(
                f"TurboQuant keys need a head dim that is a power of two, got {dim}", "use --kv-cache-dtype nvfp4_4over6"
            )
        return None


def levels(dim: int) -> Tensor:
    """The 16 levels of the numbers of unit vectors of this length, float32, rising."""
    return torch.tensor(normal_levels() / math.sqrt(dim), dtype=torch.float32)


class TurboValueCodec:
    """Uniform 4-bit values: 4 bits per number and 4 bytes."""

    name = "turboquant_4bit_value"
    bits = 4
    uses_scale = False
    extra_unit = 2

    def extra_bytes(self, dim: int) -> int:
        return 4

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        x_D = finite(x_D).clamp(-_HALF_MAX, _HALF_MAX)
        least_1 = x_D.amin(-1, keepdim=True).to(torch.float16)
        step_1 = ((x_D.amax(-1, keepdim=True) - least_1.float()) / 15).to(torch.float16)
        y_D = (x_D - least_1.float()) / torch.where(step_1 == 0, 1, step_1).float()
        codes_D = torch.floor(y_D + 0.5).clamp(0, 15).to(torch.uint8)
        return codes_D, torch.cat((step_1, least_1), -1).view(torch.uint8)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        step_1, least_1 = extra_E.contiguous().view(torch.float16).float().split(1, -1)
        return codes_D.float() * step_1 + least_1

    def refuse(self, dim: int) -> Refusal | None:
        return Refusal(f"4-bit values lie two to a byte, got head dim {dim}", "") if dim % 2 else None


def make(name: str) -> RecordsFormat:
    key = Side(Fp8Codec("fp8_e4m3")) if name == "turboquant_k8v4" else Side(TurboKeyCodec(), "hadamard")
    return RecordsFormat(name, key, Side(TurboValueCodec()), even=True)

"""Formats with a scale of their own for each vector, made when it is written: 8-bit floats, 8-bit and 4-bit whole numbers.

Beside the codes lie 4 bytes: the scale as float32. `int4_per_token_head` is asymmetric and keeps its zero point in the lowest 4
bits of the scale; its vectors are turned by a Hadamard matrix with random signs first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.errors import Refusal
from halfbyte.kvcache.formats.base import Side
from halfbyte.kvcache.formats.coded import RecordsFormat
from halfbyte.kvcache.formats.numbers import E4M3_MAX, finite, from_e4m3, to_e4m3

MIN_SCALE = 1e-6


class PerTokenHeadCodec:
    """Symmetric, 8 bits: scale = max(greatest magnitude / `most`, 1e-6)."""

    bits = 8
    uses_scale = False
    extra_unit = 4

    def __init__(self, name: str) -> None:
        self.name = name
        is_fp8 = name == "fp8_per_token_head"
        self._most = E4M3_MAX if is_fp8 else 127.0
        self._to: Callable[[Tensor], Tensor] = to_e4m3 if is_fp8 else _to_int8
        self._from: Callable[[Tensor], Tensor] = from_e4m3 if is_fp8 else _from_int8

    def extra_bytes(self, dim: int) -> int:
        return 4

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        x_D = finite(x_D)
        own_1 = (x_D.abs().amax(-1, keepdim=True) / self._most).clamp(min=MIN_SCALE)
        return self._to(x_D / own_1), own_1.view(torch.uint8)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        return self._from(codes_D) * extra_E.contiguous().view(torch.float32)

    def refuse(self, dim: int) -> Refusal | None:
        return None


def _to_int8(x: Tensor) -> Tensor:
    """Halves are rounded away from zero."""
    rounded = torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))
    return rounded.clamp(-128, 127).to(torch.int8).view(torch.uint8)


def _from_int8(codes: Tensor) -> Tensor:
    return codes.view(torch.int8).float()


class Int4PerTokenHeadCodec:
    """Asymmetric, 4 bits: real = (code - zero) * scale, with scale = (greatest - least) / 15, its lowest 4 bits cleared."""

    name = "int4_per_token_head"
    bits = 4
    uses_scale = False
    extra_unit = 4

    def extra_bytes(self, dim: int) -> int:
        return 4

    def encode(self, x_D: Tensor, scale_1: Tensor) -> tuple[Tensor, Tensor]:
        x_D = finite(x_D)
        least_1, most_1 = x_D.amin(-1, keepdim=True), x_D.amax(-1, keepdim=True)
        own_1 = ((most_1 - least_1) / 15).clamp(min=MIN_SCALE)  # finite: neither is beyond 2 ** 126
        word_1 = own_1.view(torch.int32) & ~15
        own_1 = word_1.view(torch.float32)
        zero_1 = torch.round(-least_1 / own_1).clamp(0, 15)
        codes_D = torch.round(x_D / own_1 + zero_1).clamp(0, 15).to(torch.uint8)
        return codes_D, (word_1 | zero_1.to(torch.int32)).view(torch.uint8)

    def decode(self, codes_D: Tensor, extra_E: Tensor, scale_1: Tensor) -> Tensor:
        word_1 = extra_E.contiguous().view(torch.int32)
        return (codes_D.float() - (word_1 & 15).float()) * (word_1 & ~15).view(torch.float32)

    def refuse(self, dim: int) -> Refusal | None:
        return Refusal(f"{self.name} holds two numbers to a byte, got head dim {dim}", "") if dim % 2 else None


def make(name: str) -> RecordsFormat:
    if name == Int4PerTokenHeadCodec.name:
        side = Side(Int4PerTokenHeadCodec(), "random_hadamard")
    else:
        side = Side(PerTokenHeadCodec(name))
    return RecordsFormat(name, side, side)

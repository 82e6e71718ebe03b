"""Small numbers: E4M3 and E2M1, packed codes, and sums in an order that every kernel can follow.

The arithmetic that the codecs share, in plain PyTorch; each function names its source of rounding. Knows no format.

Shape letters: D numbers of a vector, N bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Greater numbers are stored as this one: the difference of two of them is finite, and a rounded scale times its greatest code.
GREATEST = 2.0**126
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
# The magnitudes of E2M1 by code; bit 3 of a code is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def finite(x: Tensor) -> Tensor:
    """float32 in which a NaN is zero, and an infinity `GREATEST` like all that is greater."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp(-GREATEST, GREATEST)


def to_e4m3(x: Tensor) -> Tensor:
    """The bytes of E4M3 (no infinity, greatest 448), rounded to nearest even, saturating. x is finite or infinite."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def to_e5m2(x: Tensor) -> Tensor:
    """The same for E5M2, saturating at its greatest finite number, 57344."""
    return x.clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2).view(torch.uint8)


def from_e5m2(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e5m2).float()


def to_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes (uint8), rounded to nearest, ties to the even code, saturating at 6; the sign of a zero is kept."""
    y = x.abs()
    code = (y > 0.25).to(torch.uint8)
    for bound, includes in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (y >= bound) if includes else (y > bound)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], device=codes.device)
    return table[codes.long()]


def fold_sum(x_D: Tensor) -> Tensor:
    """The sum over the last dimension, [..., 1]: halves are added until one number is left; the length is a power of two."""
    while x_D.shape[-1] > 1:
        half = x_D.shape[-1] // 2
        x_D = x_D[..., :half] + x_D[..., half:]
    return x_D


def packed_bytes(bits: int, dim: int) -> int:
    """Bytes of `dim` codes of `bits` (4, 5, 6, 8, 16, 32)."""
    return dim * bits // 8


def pack(codes_D: Tensor, bits: int) -> Tensor:
    """Codes as bytes [..., N]. Below 8 bits: the low nibbles, two to a byte, the even index low; then what is left of each code
    (1 or 2 bits), 8 or 4 to a byte, the first lowest."""
    if bits >= 8:
        return codes_D.contiguous().view(torch.uint8)
    parts = [_gather_bits(codes_D & 15, 4)]
    if bits > 4:
        parts.append(_gather_bits(codes_D >> 4, bits - 4))
    return torch.cat(parts, -1)


def unpack(data_N: Tensor, bits: int, dim: int) -> Tensor:
    """The codes [..., D] of `pack`; for 16 and 32 bits as int16 and int32."""
    if bits >= 8:
        wide = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
        return data_N.contiguous().view(wide)
    low = _spread_bits(data_N[..., : dim // 2], 4)
    return low if bits == 4 else low | (_spread_bits(data_N[..., dim // 2 :], bits - 4) << 4)


def _gather_bits(codes_D: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    parts = codes_D.unflatten(-1, (-1, per_byte))
    packed = parts[..., 0].clone()
    for i in range(1, per_byte):
        packed |= parts[..., i] << (i * bits)
    return packed


def _spread_bits(data_N: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data_N.device)
    return ((data_N[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)

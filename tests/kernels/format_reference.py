"""The arithmetic of the KV formats a second time: numpy, one vector and mostly one number after another.

Written from the formats' definitions, not from the laws, which `test_format_encodings.py` and `test_mla_records.py` compare with
it bit for bit. Every function takes vectors as the format gets them (already turned), in float32, and returns whole numbers or
bytes. Numbers are finite and below 2 ** 126.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, floor
from typing import Any

import numpy as np

F32, F16 = np.float32, np.float16
Number = float | np.floating[Any]
BLOCK = 16  # numbers per scale of the NVFP4 family
ULTRAQUANT_BLOCK = 32
MLA_LATENT, MLA_TILE, MLA_ROTATED = 512, 128, 64

exact = np.errstate(over="ignore", under="ignore")  # infinite errors and lost bits are part of the definitions


def small_float(exponent_bits: int, mantissa_bits: int, num_codes: int) -> list[float]:
    """The magnitudes of a small float by code, rising; the code of the last one that is a number is num_codes - 1."""
    bias, steps = (1 << (exponent_bits - 1)) - 1, 1 << mantissa_bits
    found = []
    for code in range(num_codes):
        exponent, mantissa = divmod(code, steps)
        found.append(mantissa / steps * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa / steps) * 2.0 ** (exponent - bias))
    return found


E4M3 = small_float(4, 3, 127)  # 127 is NaN
E5M2 = small_float(5, 2, 124)  # 124 is infinity
E2M1 = small_float(2, 1, 8)


def nearest(x: Number, magnitudes: list[float]) -> int:
    """The code of |x|: the nearest magnitude, of two the one with the even code, at most the last."""
    y = abs(float(x))
    high = bisect_left(magnitudes, y)
    if high == len(magnitudes) or high == 0:
        return min(high, len(magnitudes) - 1)
    below, above = y - magnitudes[high - 1], magnitudes[high] - y
    if below == above:
        return high - high % 2
    return high - 1 if below < above else high


def sign_of(x: Number) -> int:
    return int(np.signbit(F32(x)))


def to_e4m3(x: Number) -> int:
    return nearest(x, E4M3) | sign_of(x) << 7


def to_e5m2(x: Number) -> int:
    return nearest(x, E5M2) | sign_of(x) << 7


def to_e2m1(x: Number) -> int:
    return nearest(x, E2M1) | sign_of(x) << 3


def from_e4m3(code: int) -> np.float32:
    return F32(-E4M3[code & 127] if code & 128 else E4M3[code])


def from_e2m1(code: int) -> np.float32:
    return F32(-E2M1[code & 7] if code & 8 else E2M1[code])


def bytes_of(*numbers: np.generic) -> list[int]:
    return [byte for number in numbers for byte in number.tobytes()]


def pack(codes: list[int], bits: int) -> list[int]:
    """Nibbles two to a byte, the even index low; then what codes have above them, the first code in the lowest bits."""
    packed = [(codes[i] & 15) | (codes[i + 1] & 15) << 4 for i in range(0, len(codes), 2)]
    if bits > 4:
        per_byte = 8 // (bits - 4)
        for i in range(0, len(codes), per_byte):
            packed.append(sum((codes[i + j] >> 4) << (j * (bits - 4)) for j in range(per_byte)))
    return packed


def halves_sum(values: np.ndarray) -> np.float32:
    """The second half is added to the first until one number is left."""
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return F32(values[0])


# Blocks of 16 over a scale per head: nvfp4, nvfp4_4over6, int4, int5, int6


@exact
def encode_blocks(kind: str, x: np.ndarray, scale: np.float32) -> tuple[list[int], list[int]]:
    """The codes of a vector and the E4M3 byte of each of its blocks."""
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        tried = [_encode_block(kind, block, wanted, scale) for wanted in _wanted_scales(kind, block, scale)]
        best = min(tried, key=lambda found: found[2])  # the first of equals
        codes += best[0]
        scales.append(best[1])
    return codes, scales


def _wanted_scales(kind: str, block: np.ndarray, scale: np.float32) -> list[np.float32]:
    """nvfp4: the greatest magnitude a becomes 6. 4over6: 6, or 4. intN: 2 ** (N - 1) - 1, or -2 ** (N - 1) whatever its sign."""
    a = F32(np.abs(block).max())
    if kind == "nvfp4":
        return [a / (F32(6) * scale)]
    if kind == "nvfp4_4over6":
        return [a / (F32(6) * scale), a / (F32(4) * scale)]
    half = 1 << (int(kind[3:]) - 1)
    is_negative = any(number == -a for number in block)
    return [a / (F32(half - 1) * scale), (a if is_negative else -a) / (F32(half) * scale)]


def _encode_block(kind: str, block: np.ndarray, wanted: np.float32, scale: np.float32) -> tuple[list[int], int, np.float32]:
    """Codes, the scale's byte, and the squared error."""
    byte = to_e4m3(wanted)
    unit = from_e4m3(byte) * scale
    inverse = F32(0) if unit == 0 else F32(1) / unit
    if kind.startswith("nvfp4"):
        codes = [to_e2m1(number * inverse) for number in block]
        decoded = np.array([from_e2m1(code) for code in codes])
    else:
        half = 1 << (int(kind[3:]) - 1)
        codes = [int(np.clip(np.rint(number * inverse), -half, half - 1)) + half for number in block]
        decoded = np.array([code - half for code in codes], F32)
    errors = block - decoded * unit
    return codes, byte, halves_sum(errors * errors)


def block_page(
    kinds: tuple[str, str], k_SGD: np.ndarray, v_SGD: np.ndarray, k_scale_G: np.ndarray, v_scale_G: np.ndarray
) -> np.ndarray:
    """A full page, FlashInfer's "HND": K codes, K scales, V codes, V scales; in each head after head and token after token."""
    page: list[int] = []
    for kind, x_SGD, scale_G in ((kinds[0], k_SGD, k_scale_G), (kinds[1], v_SGD, v_scale_G)):
        bits = 4 if kind.startswith("nvfp4") else int(kind[3:])
        encoded = [encode_blocks(kind, x_SGD[t, g], F32(scale_G[g])) for g in range(x_SGD.shape[1]) for t in range(len(x_SGD))]
        page += [byte for codes, _ in encoded for byte in pack(codes, bits)]
        page += [byte for _, scales in encoded for byte in scales]
    return np.array(page, np.uint8)


# Records: one vector's bytes; a record of a token and head is that of K, then that of V


def encode_ultraquant(x: np.ndarray) -> list[int]:
    """Codes of all blocks, then a biased exponent per block."""
    codes: list[int] = []
    exponents: list[int] = []
    middles = [(low + high) / 2 for low, high in zip(E2M1, E2M1[1:], strict=False)]
    for start in range(0, len(x), ULTRAQUANT_BLOCK):
        block = x[start : start + ULTRAQUANT_BLOCK]
        byte = _ultraquant_exponent(F32(0.156) * F32(np.abs(block).max()))
        exponents.append(byte)
        for number in block:
            y = abs(float(number)) / 2.0 ** (byte - 127)
            magnitude = sum(y > middle for middle in middles)  # a tie goes down
            codes.append(0 if byte == 0 else magnitude | sign_of(number) << 3)
    return pack(codes, 4) + exponents


def _ultraquant_exponent(share: np.float32) -> int:
    """127 + floor(log2(share) + 0.5); the logarithm of the mantissa is rounded to float32."""
    if share == 0:
        return 0
    mantissa, exponent = np.frexp(share)
    power = int(exponent) + floor(F32(np.log2(np.float64(mantissa))) + F32(0.5))
    return min(max(power + 127, 0), 254)


@exact
def encode_per_token_head(name: str, x: np.ndarray) -> list[int]:
    if name == "int4_per_token_head":
        return _encode_int4(x)
    most = F32(448) if name == "fp8_per_token_head" else F32(127)
    scale = max(F32(np.abs(x).max()) / most, F32(1e-6))
    if name == "fp8_per_token_head":
        codes = [to_e4m3(number / scale) for number in x]
    else:
        codes = [int(np.clip(np.trunc(number / scale + np.copysign(F32(0.5), number)), -128, 127)) & 255 for number in x]
    return codes + bytes_of(scale)


def _encode_int4(x: np.ndarray) -> list[int]:
    """The zero point lies in the lowest 4 bits of the scale, which is used as a reader sees it: without them."""
    scale = max((F32(x.max()) - F32(x.min())) / F32(15), F32(1e-6))
    word = int(scale.view(np.uint32)) & ~15
    scale = np.uint32(word).view(F32)
    zero = np.clip(np.rint(-F32(x.min()) / scale), 0, 15)
    codes = [int(np.clip(np.rint(number / scale + zero), 0, 15)) for number in x]
    return pack(codes, 4) + bytes_of(np.uint32(word | int(zero)))


def normal_levels(num_levels: int = 16) -> list[float]:
    """Lloyd and Max's levels for N(0, 1): each becomes the mean of the numbers that are nearest to it, by trapezoids."""
    levels = [-3.5 + 7 * i / (num_levels - 1) for i in range(num_levels)]
    for _ in range(200):
        borders = [-8.0, *((low + high) / 2 for low, high in zip(levels, levels[1:], strict=False)), 8.0]
        found = [_mean_between(low, high) for low, high in zip(borders, borders[1:], strict=False)]
        change = max(abs(new - old) for new, old in zip(found, levels, strict=True))
        levels = found
        if change < 1e-10:
            break
    return [(level - mirrored) / 2 for level, mirrored in zip(levels, reversed(levels), strict=True)]


def _mean_between(low: float, high: float, num_points: int = 200) -> float:
    points = [low + (high - low) * i / (num_points - 1) for i in range(num_points)]
    weights = [exp(-point * point / 2) for point in points]
    weights[0], weights[-1] = weights[0] / 2, weights[-1] / 2
    return sum(point * weight for point, weight in zip(points, weights, strict=True)) / sum(weights)


def encode_turbo_key(x: np.ndarray, levels: list[float]) -> list[int]:
    """Codes of the vector's direction, and the float16 that makes the coded one as long as the vector. levels: of N(0, 1)."""
    table = np.array([level / len(x) ** 0.5 for level in levels], F32)
    length = np.sqrt(halves_sum(x * x))
    unit = x / (length + F32(1e-8))
    middles = [(low + high) / F32(2) for low, high in zip(table, table[1:], strict=False)]
    codes = [sum(number > middle for middle in middles) for number in unit]
    norm = length / np.sqrt(halves_sum(table[codes] * table[codes]))
    return pack(codes, 4) + bytes_of(F16(min(norm, F32(65504))))


def encode_turbo_value(x: np.ndarray) -> list[int]:
    least = F16(x.min())
    step = F16((F32(x.max()) - F32(least)) / F32(15))
    divisor = F32(1) if step == 0 else F32(step)
    codes = [int(np.clip(np.floor((number - F32(least)) / divisor + F32(0.5)), 0, 15)) for number in x]
    return pack(codes, 4) + bytes_of(step, least)


# Records of multi-head latent attention


def bfloat16_bytes(x: np.ndarray) -> list[int]:
    """Rounded to nearest even in the upper 16 bits."""
    words = x.astype(F32).view(np.uint32).astype(np.uint64)
    return bytes_of(*((words + 0x7FFF + (words >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16))


def encode_fp8_mla(x: np.ndarray) -> list[int]:
    """656 bytes of a token: 512 E4M3 | 4 float32 | 64 bfloat16, zeros where x has no rotated part."""
    codes: list[int] = []
    scales = []
    for start in range(0, MLA_LATENT, MLA_TILE):
        tile = x[start : start + MLA_TILE]
        scales.append(max(F32(np.abs(tile).max()) / F32(448), np.finfo(F32).tiny))
        codes += [to_e4m3(number / scales[-1]) for number in tile]
    rotated = x[MLA_LATENT:] if len(x) > MLA_LATENT else np.zeros(MLA_ROTATED, F32)
    return codes + bytes_of(*scales) + bfloat16_bytes(rotated)


def encode_nvfp4_mla(x: np.ndarray, scale: np.float32) -> list[int]:
    """352 bytes of a token: 512 E2M1 | 64 E4M3 | 32 E4M3 scales, that of block s at byte 8 * (s mod 4) + s div 4."""
    codes, scales = encode_blocks("nvfp4", x[:MLA_LATENT], scale)
    rotated = x[MLA_LATENT:] if len(x) > MLA_LATENT else np.zeros(MLA_ROTATED, F32)
    placed = [0] * len(scales)
    for block, byte in enumerate(scales):
        placed[8 * (block % 4) + block // 4] = byte
    return pack(codes, 4) + [to_e4m3(number) for number in rotated] + placed

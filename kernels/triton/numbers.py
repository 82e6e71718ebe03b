"""The arithmetic of `kvcache.formats.numbers` as Triton device functions: same bits, on every target.

Conversions are shifts of bits, so that no hardware needs to know a type. Divisions are IEEE's, sums go in the law's order, and
who compiles these functions turns the fusion of products and sums off (`FUSION_OFF`): then a GPU rounds as PyTorch does. Codes
and bytes are int32 while they are worked on. Called by codecs, writers and readers.

Shape letters: R rows, N numbers of a row, K blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kvcache.formats import numbers as law

# An option of each launch: a fused multiply-add rounds once where the law rounds twice.
FUSION_OFF = {"enable_fp_fusion": False}

_GREATEST = tl.constexpr(law.GREATEST)


@triton.jit
def finite(x: tl.tensor) -> tl.tensor:
    """A NaN is zero; an infinity is `GREATEST`, like all that is greater."""
    return tl.where(x != x, 0.0, tl.clamp(x, -_GREATEST, _GREATEST))


@triton.jit
def round_even(x: tl.tensor) -> tl.tensor:
    """The nearest whole number, ties to even; |x| < 2 ** 22. The sum has no bits left for fractions."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    return _to_small_float(x, 3, -6, 448.0)


@triton.jit
def to_e5m2(x: tl.tensor) -> tl.tensor:
    return _to_small_float(x, 2, -14, 57344.0)


@triton.jit
def _to_small_float(x: tl.tensor, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr, MOST: tl.constexpr) -> tl.tensor:
    """Bytes of floats with MANTISSA bits, the smallest normal one 2 ** MIN_EXPONENT: nearest, ties to even, saturating."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    magnitude = tl.minimum(tl.abs(x), MOST)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((126 + MIN_EXPONENT) << MANTISSA)
    # A denormal is a whole number of 2 ** (MIN_EXPONENT - MANTISSA): of the last bit of a float32 that has this exponent.
    EXPONENT: tl.constexpr = 23 + MIN_EXPONENT - MANTISSA
    denormal = (magnitude + 2.0**EXPONENT).to(tl.int32, bitcast=True) - ((EXPONENT + 127) << 23)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return tl.where(magnitude < 2.0**MIN_EXPONENT, denormal, normal) | sign


@triton.jit
def from_e4m3(byte: tl.tensor) -> tl.tensor:
    return _with_sign(_floats((byte & 127) << 20) * 2.0**120, byte, 24)


@triton.jit
def from_e5m2(byte: tl.tensor) -> tl.tensor:
    return _with_sign(_floats((byte & 127) << 21) * 2.0**112, byte, 24)


@triton.jit
def to_e2m1(x: tl.tensor) -> tl.tensor:
    """Nearest, ties to the even code, saturating; the sign of a zero is kept."""
    y = tl.abs(x)
    code = (y > 0.25).to(tl.int32) + (y >= 0.75).to(tl.int32) + (y > 1.25).to(tl.int32) + (y >= 1.75).to(tl.int32)
    code += (y > 2.5).to(tl.int32) + (y >= 3.5).to(tl.int32) + (y > 5.0).to(tl.int32)
    return code | sign_code(x)


@triton.jit
def sign_code(x: tl.tensor) -> tl.tensor:
    """Bit 3 of an E2M1 code: set for negative numbers and for -0."""
    return (x.to(tl.int32, bitcast=True) >> 28) & 8


@triton.jit
def from_e2m1(code: tl.tensor) -> tl.tensor:
    return _with_sign(_floats((code & 7) << 22) * 2.0**126, code, 28)


@triton.jit
def _floats(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _with_sign(magnitude: tl.tensor, code: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """The magnitude, with the bit of the code that SHIFT moves to bit 31 as its sign."""
    return _floats(magnitude.to(tl.int32, bitcast=True) | ((code << SHIFT) & -0x80000000))


@triton.constexpr_function
def _num_halvings(length: int) -> int:
    return length.bit_length() - 1


@triton.jit
def fold_sum(x_RN: tl.tensor) -> tl.tensor:
    """Sums of rows [R, 1]: halves are added until one number is left, as the law adds them."""
    for _ in tl.static_range(_num_halvings(x_RN.shape[1])):
        halves = tl.permute(tl.reshape(x_RN, [x_RN.shape[0], 2, x_RN.shape[1] // 2]), (0, 2, 1))
        low, high = tl.split(halves)
        x_RN = low + high
    return x_RN


@triton.jit
def in_blocks(x_RN: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """[R, N] -> [R * K, BLOCK]."""
    return tl.reshape(x_RN, [x_RN.shape[0] * (x_RN.shape[1] // BLOCK), BLOCK])


@triton.jit
def repeat(x_RK: tl.tensor, TIMES: tl.constexpr) -> tl.tensor:
    """[R, K] -> [R, K * TIMES]: each number that often, side by side."""
    wide = tl.broadcast_to(x_RK[:, :, None], [x_RK.shape[0], x_RK.shape[1], TIMES])
    return tl.reshape(wide, [x_RK.shape[0], x_RK.shape[1] * TIMES])


@triton.jit
def merge_pairs(codes_RN: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """[R, N] of so many bits -> [R, N / 2] of twice as many, the even index low."""
    even, odd = tl.split(tl.reshape(codes_RN, [codes_RN.shape[0], codes_RN.shape[1] // 2, 2]))
    return even | (odd << BITS)


@triton.jit
def to_bytes(word_R1: tl.tensor, NUM: tl.constexpr) -> tl.tensor:
    """The lowest bytes of an int32, lowest first: [R, NUM]."""
    return (word_R1 >> (8 * tl.arange(0, NUM))[None, :]) & 255


@triton.jit
def from_bytes(bytes_RN: tl.tensor) -> tl.tensor:
    """The int32 [R, 1] that `to_bytes` took apart."""
    return tl.sum(bytes_RN << (8 * tl.arange(0, bytes_RN.shape[1]))[None, :], 1, keep_dims=True)


@triton.jit
def half_bits(x: tl.tensor) -> tl.tensor:
    """float32 as the bits of the nearest float16."""
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def from_half_bits(bits: tl.tensor) -> tl.tensor:
    """The float32 of the float16 in the lowest 16 bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)

"""The codecs of `kvcache.formats` as Triton device functions: rows of K or V to codes and the bytes beside them, and back.

An encoder takes x_RN (float32, N the head dim's next power of two, zeros beyond the head dim), the scale of each row and the
codec's parameter, and returns codes_RN and extra_RE; a codec without extra bytes returns its codes twice. A decoder takes the
codes, all or those of even or odd index, extra_RE, the scale and the parameter. Codes are int32 below 16 bits; those of dense
codecs are the numbers themselves. Knows no layout and no slots; the laws are the codecs' own `encode` and `decode`.

Shape letters: R rows, N numbers of a row, K blocks, E extra bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from halfbyte.kernels.triton.numbers import (
    finite,
    fold_sum,
    from_bytes,
    from_e2m1,
    from_e4m3,
    from_e5m2,
    from_half_bits,
    half_bits,
    in_blocks,
    repeat,
    round_even,
    sign_code,
    to_bytes,
    to_e2m1,
    to_e4m3,
    to_e5m2,
)
from halfbyte.kvcache.formats import turboquant
from halfbyte.kvcache.formats.base import Codec


@dataclass(frozen=True, slots=True)
class CodecKernels:
    """The device functions of a codec, and what they take as their last argument, a constant of the compilation.

    for_dim: makes the parameter for a head dim, where it depends on that.
    """

    encode: Any
    decode: Any
    parameter: Any = 0
    for_dim: Callable[[int], Any] | None = None


@triton.jit
def encode_dense(x_RN: tl.tensor, scale_R1: tl.tensor, UNUSED: tl.constexpr) -> tl.tuple:
    """The cast to the cache's type is the writer's."""
    return x_RN, x_RN


@triton.jit
def decode_dense(codes_RN: tl.tensor, extra_RE: tl.tensor, scale_R1: tl.tensor, UNUSED: tl.constexpr) -> tl.tensor:
    return codes_RN.to(tl.float32)


@triton.jit
def encode_fp8(x_RN: tl.tensor, scale_R1: tl.tensor, KIND: tl.constexpr) -> tl.tuple:
    y_RN = tl.div_rn(finite(x_RN), scale_R1)
    codes_RN = to_e4m3(y_RN) if KIND == "e4m3" else to_e5m2(y_RN)
    return codes_RN, codes_RN


@triton.jit
def decode_fp8(codes_RN: tl.tensor, extra_RE: tl.tensor, scale_R1: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    return (from_e4m3(codes_RN) if KIND == "e4m3" else from_e5m2(codes_RN)) * scale_R1


@triton.jit
def encode_per_token_head(x_RN: tl.tensor, scale_R1: tl.tensor, KIND: tl.constexpr) -> tl.tuple:
    x_RN = finite(x_RN)
    most_R1 = tl.max(tl.abs(x_RN), 1, keep_dims=True)
    own_R1 = tl.maximum(tl.div_rn(most_R1, 448.0 if KIND == "e4m3" else 127.0), 1e-6)
    y_RN = tl.div_rn(x_RN, own_R1)
    codes_RN = to_e4m3(y_RN) if KIND == "e4m3" else _to_int8(y_RN)
    return codes_RN, to_bytes(own_R1.to(tl.int32, bitcast=True), 4)


@triton.jit
def _to_int8(x_RN: tl.tensor) -> tl.tensor:
    """The byte of a whole number; halves are rounded away from zero."""
    return tl.clamp(x_RN + tl.where(x_RN < 0, -0.5, 0.5), -128.0, 127.0).to(tl.int32) & 255


@triton.jit
def decode_per_token_head(codes_RN: tl.tensor, extra_RE: tl.tensor, scale_R1: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    own_R1 = from_bytes(extra_RE).to(tl.float32, bitcast=True)
    number_RN = from_e4m3(codes_RN) if KIND == "e4m3" else codes_RN.to(tl.int8).to(tl.float32)
    return number_RN * own_R1


@triton.jit
def encode_int4_per_token_head(x_RN: tl.tensor, scale_R1: tl.tensor, DIM: tl.constexpr) -> tl.tuple:
    x_RN = finite(x_RN)
    least_R1, most_R1 = _range(x_RN, DIM)
    own_R1 = tl.maximum(tl.div_rn(most_R1 - least_R1, 15.0), 1e-6)
    word_R1 = own_R1.to(tl.int32, bitcast=True) & ~15
    own_R1 = word_R1.to(tl.float32, bitcast=True)
    zero_R1 = round_even(tl.clamp(tl.div_rn(-least_R1, own_R1), 0.0, 15.0))
    codes_RN = round_even(tl.clamp(tl.div_rn(x_RN, own_R1) + zero_R1, 0.0, 15.0)).to(tl.int32)
    return codes_RN, to_bytes(word_R1 | zero_R1.to(tl.int32), 4)


@triton.jit
def _range(x_RN: tl.tensor, DIM: tl.constexpr) -> tl.tuple:
    """The least and the greatest of the first DIM numbers of each row."""
    is_number_1N = (tl.arange(0, x_RN.shape[1]) < DIM)[None, :]
    least_R1 = tl.min(tl.where(is_number_1N, x_RN, float("inf")), 1, keep_dims=True)
    return least_R1, tl.max(tl.where(is_number_1N, x_RN, float("-inf")), 1, keep_dims=True)


@triton.jit
def decode_int4_per_token_head(codes_RN: tl.tensor, extra_RE: tl.tensor, scale_R1: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    word_R1 = from_bytes(extra_RE)
    return (codes_RN - (word_R1 & 15)).to(tl.float32) * (word_R1 & ~15).to(tl.float32, bitcast=True)


@triton.jit
def encode_nvfp4(x_RN: tl.tensor, scale_R1: tl.tensor, NUM_PEAKS: tl.constexpr) -> tl.tuple:
    """NUM_PEAKS: 1 maps the greatest magnitude to 6, 2 also to 4, and takes what errs less."""
    x_B16 = in_blocks(finite(x_RN), 16)
    scale_B1 = tl.reshape(tl.broadcast_to(scale_R1, [x_RN.shape[0], x_RN.shape[1] // 16]), [x_B16.shape[0], 1])
    most_B1 = tl.max(tl.abs(x_B16), 1, keep_dims=True)
    codes_B16, byte_B1, error_B1 = _coded(x_B16, tl.div_rn(most_B1, 6.0 * scale_B1), scale_B1, 0)
    if NUM_PEAKS == 2:
        other_B16, other_B1, other_error_B1 = _coded(x_B16, tl.div_rn(most_B1, 4.0 * scale_B1), scale_B1, 0)
        codes_B16 = tl.where(other_error_B1 < error_B1, other_B16, codes_B16)
        byte_B1 = tl.where(other_error_B1 < error_B1, other_B1, byte_B1)
    return tl.reshape(codes_B16, x_RN.shape), tl.reshape(byte_B1, [x_RN.shape[0], x_RN.shape[1] // 16])


@triton.jit
def encode_ints(x_RN: tl.tensor, scale_R1: tl.tensor, HALF: tl.constexpr) -> tl.tuple:
    """HALF: 8, 16 or 32, the offset of the codes and their longer side."""
    x_B16 = in_blocks(finite(x_RN), 16)
    scale_B1 = tl.reshape(tl.broadcast_to(scale_R1, [x_RN.shape[0], x_RN.shape[1] // 16]), [x_B16.shape[0], 1])
    most_B1 = tl.max(tl.abs(x_B16), 1, keep_dims=True)
    signed_B1 = tl.where(tl.min(x_B16, 1, keep_dims=True) == -most_B1, most_B1, -most_B1)
    short_B16, short_B1, short_error_B1 = _coded(x_B16, tl.div_rn(most_B1, scale_B1 * (HALF - 1.0)), scale_B1, HALF)
    long_B16, long_B1, long_error_B1 = _coded(x_B16, tl.div_rn(signed_B1, scale_B1 * (HALF + 0.0)), scale_B1, HALF)
    codes_B16 = tl.where(long_error_B1 < short_error_B1, long_B16, short_B16)
    byte_B1 = tl.where(long_error_B1 < short_error_B1, long_B1, short_B1)
    return tl.reshape(codes_B16, x_RN.shape), tl.reshape(byte_B1, [x_RN.shape[0], x_RN.shape[1] // 16])


@triton.jit
def _coded(x_B16: tl.tensor, wanted_B1: tl.tensor, scale_B1: tl.tensor, HALF: tl.constexpr) -> tl.tuple:
    """One candidate: the codes at the block scale nearest to the wanted one, its byte, and their squared error."""
    byte_B1 = to_e4m3(wanted_B1)
    unit_B1 = from_e4m3(byte_B1) * scale_B1
    y_B16 = x_B16 * tl.where(unit_B1 == 0, 0.0, tl.div_rn(1.0, unit_B1))
    codes_B16 = to_e2m1(y_B16) if HALF == 0 else round_even(tl.clamp(y_B16, 0.0 - HALF, HALF - 1.0)).to(tl.int32) + HALF
    rest_B16 = x_B16 - _number(codes_B16, HALF) * unit_B1
    return codes_B16, byte_B1, fold_sum(rest_B16 * rest_B16)


@triton.jit
def _number(codes: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    return from_e2m1(codes) if HALF == 0 else (codes - HALF).to(tl.float32)


@triton.jit
def decode_nvfp4(codes_RN: tl.tensor, extra_RK: tl.tensor, scale_R1: tl.tensor, NUM_PEAKS: tl.constexpr) -> tl.tensor:
    return decode_ints(codes_RN, extra_RK, scale_R1, 0)


@triton.jit
def decode_ints(codes_RN: tl.tensor, extra_RK: tl.tensor, scale_R1: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    unit_RK = from_e4m3(extra_RK) * scale_R1
    return _number(codes_RN, HALF) * repeat(unit_RK, codes_RN.shape[1] // extra_RK.shape[1])


@triton.jit
def encode_ultraquant(x_RN: tl.tensor, scale_R1: tl.tensor, UNUSED: tl.constexpr) -> tl.tuple:
    x_K32 = in_blocks(finite(x_RN), 32)
    mantissa_K1, exponent_K1 = _frexp(tl.max(tl.abs(x_K32), 1, keep_dims=True) * 0.156)
    power_K1 = exponent_K1 - (mantissa_K1 < 0.70710678118654752).to(tl.int32)
    byte_K1 = tl.where(mantissa_K1 == 0, 0, tl.minimum(tl.maximum(power_K1 + 127, 0), 254))
    y_K32 = tl.abs(tl.where(byte_K1 == 0, 0.0, tl.div_rn(x_K32, _power_of_two(byte_K1))))
    codes_K32 = (y_K32 > 0.25).to(tl.int32) + (y_K32 > 0.75).to(tl.int32) + (y_K32 > 1.25).to(tl.int32)
    codes_K32 += (y_K32 > 1.75).to(tl.int32) + (y_K32 > 2.5).to(tl.int32) + (y_K32 > 3.5).to(tl.int32)
    codes_K32 += (y_K32 > 5.0).to(tl.int32)
    codes_K32 = tl.where(byte_K1 == 0, 0, codes_K32 | sign_code(x_K32))
    return tl.reshape(codes_K32, x_RN.shape), tl.reshape(byte_K1, [x_RN.shape[0], x_RN.shape[1] // 32])


@triton.jit
def _frexp(x: tl.tensor) -> tl.tuple:
    """x = mantissa * 2 ** exponent, the mantissa in [1/2, 1), or zero; x is not negative."""
    is_denormal = x < 2.0**-126
    bits = tl.where(is_denormal, x * 2.0**24, x).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 - tl.where(is_denormal, 24, 0)
    mantissa = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    return tl.where(bits == 0, 0.0, mantissa), exponent


@triton.jit
def _power_of_two(biased: tl.tensor) -> tl.tensor:
    """2 ** (biased - 127) for 1 .. 254; 0 for 0."""
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_ultraquant(codes_RN: tl.tensor, extra_RK: tl.tensor, scale_R1: tl.tensor, UNUSED: tl.constexpr) -> tl.tensor:
    return from_e2m1(codes_RN) * repeat(_power_of_two(extra_RK), codes_RN.shape[1] // extra_RK.shape[1])


@triton.jit
def encode_turbo_key(x_RN: tl.tensor, scale_R1: tl.tensor, TABLE: tl.constexpr) -> tl.tuple:
    """TABLE: 16 levels, and the 15 middles between them."""
    x_RN = tl.clamp(finite(x_RN), -65504.0, 65504.0)
    length_R1 = tl.sqrt_rn(fold_sum(x_RN * x_RN))
    unit_RN = tl.div_rn(x_RN, length_R1 + 1e-8)
    codes_RN = (unit_RN > TABLE[16]).to(tl.int32)
    for i in tl.static_range(17, 31):
        codes_RN += (unit_RN > TABLE[i]).to(tl.int32)
    level_RN = _level(codes_RN, TABLE)
    coded_R1 = tl.sqrt_rn(fold_sum(level_RN * level_RN))
    return codes_RN, to_bytes(half_bits(tl.minimum(tl.div_rn(length_R1, coded_R1), 65504.0)), 2)


@triton.jit
def decode_turbo_key(codes_RN: tl.tensor, extra_RE: tl.tensor, scale_R1: tl.tensor, TABLE: tl.constexpr) -> tl.tensor:
    return _level(codes_RN, TABLE) * from_half_bits(from_bytes(extra_RE))


@triton.jit
def _level(codes: tl.tensor, TABLE: tl.constexpr) -> tl.tensor:
    level = tl.full(codes.shape, TABLE[0], tl.float32)
    for i in tl.static_range(1, 16):
        level = tl.where(codes == i, TABLE[i], level)
    return level


@triton.jit
def encode_turbo_value(x_RN: tl.tensor, scale_R1: tl.tensor, DIM: tl.constexpr) -> tl.tuple:
    x_RN = tl.clamp(finite(x_RN), -65504.0, 65504.0)
    least_R1, most_R1 = _range(x_RN, DIM)
    least_bits_R1 = half_bits(least_R1)
    least_R1 = from_half_bits(least_bits_R1)
    step_bits_R1 = half_bits(tl.div_rn(most_R1 - least_R1, 15.0))
    step_R1 = from_half_bits(step_bits_R1)
    y_RN = tl.div_rn(x_RN - least_R1, tl.where(step_R1 == 0, 1.0, step_R1))
    codes_RN = tl.clamp(y_RN + 0.5, 0.0, 15.0).to(tl.int32)  # rounded down; `tl.floor` would flush denormals
    return codes_RN, to_bytes(step_bits_R1 | (least_bits_R1 << 16), 4)


@triton.jit
def decode_turbo_value(codes_RN: tl.tensor, extra_RE: tl.tensor, scale_R1: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    word_R1 = from_bytes(extra_RE)
    return codes_RN.to(tl.float32) * from_half_bits(word_R1) + from_half_bits(word_R1 >> 16)


def _turbo_table(dim: int) -> tuple[float, ...]:
    """As the law has them, in float32."""
    levels = turboquant.levels(dim)
    return (*levels.tolist(), *((levels[1:] + levels[:-1]) / 2).tolist())


_DENSE = CodecKernels(encode_dense, decode_dense)
CODECS: dict[str, CodecKernels] = {
    "bfloat16": _DENSE,
    "float16": _DENSE,
    "float32": _DENSE,
    "fp8_e4m3": CodecKernels(encode_fp8, decode_fp8, "e4m3"),
    "fp8_e5m2": CodecKernels(encode_fp8, decode_fp8, "e5m2"),
    "fp8_per_token_head": CodecKernels(encode_per_token_head, decode_per_token_head, "e4m3"),
    "int8_per_token_head": CodecKernels(encode_per_token_head, decode_per_token_head, "int8"),
    "int4_per_token_head": CodecKernels(encode_int4_per_token_head, decode_int4_per_token_head, for_dim=int),
    "nvfp4": CodecKernels(encode_nvfp4, decode_nvfp4, 1),
    "nvfp4_4over6": CodecKernels(encode_nvfp4, decode_nvfp4, 2),
    "int4": CodecKernels(encode_ints, decode_ints, 8),
    "int5": CodecKernels(encode_ints, decode_ints, 16),
    "int6": CodecKernels(encode_ints, decode_ints, 32),
    "ultraquant_4bit": CodecKernels(encode_ultraquant, decode_ultraquant),
    "turboquant_4bit_key": CodecKernels(encode_turbo_key, decode_turbo_key, for_dim=_turbo_table),
    "turboquant_4bit_value": CodecKernels(encode_turbo_value, decode_turbo_value, for_dim=int),
}


def codec_kernels(codec: Codec, dim: int) -> CodecKernels:
    """The device functions for vectors of `dim` numbers, and their parameter."""
    found = CODECS[codec.name]
    return found if found.for_dim is None else replace(found, parameter=found.for_dim(dim))

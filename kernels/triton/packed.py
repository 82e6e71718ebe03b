"""Codes of 4 to 8 bits as numbers for tensor cores, several at a time: words of 32 bits become pairs of float16.

The twin of the codecs' `decode` for products: exact in float16, without the kv head's scale, which the scores are multiplied by
instead. A word holds the codes of neighbouring numbers; its halves of 16 bits become two numbers with few shifts and masks, so
that nothing is as wide as it is when numbers are decoded one by one. Knows codecs by name; called by `kv_parts`.

Shape letters: L tokens, W words of a vector, E extra bytes, C numbers side by side.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from halfbyte.kvcache.formats.base import Codec

MIN_DIM = 64  # below, tiles of words are narrower than the units of tensor cores

_MAGIC = tl.constexpr(0x6400)  # of float16: the bits of 1024, whose last bit is worth 1


class PackedKernels(NamedTuple):
    """How a codec's words are read: number = (pair's - offset) * factor * unit, and what comes of a product of it, * power.

    pairs: device function (word_LW, high_LW, INDEX) -> uint32 [L, W], of each half of 16 bits a float16: of the codes number
    INDEX and INDEX + num / 2 of the word, if `num` is how many a word has; high_LW holds the bits above the fourth, if any.
    unit: (extra_LE) -> float16 [L, E], that of each block of 16 numbers; None: 1.
    """

    pairs: Any
    unit: Any = None
    offset: float = 0.0
    factor: float = 1.0
    power: float = 1.0
    num: int = 8


@triton.jit
def ints_4(word: tl.tensor, high: tl.tensor, INDEX: tl.constexpr) -> tl.tensor:
    return ((word >> (4 * INDEX)) & 0x000F000F) | (_MAGIC * 0x10001)


@triton.jit
def ints_5(word: tl.tensor, high: tl.tensor, INDEX: tl.constexpr) -> tl.tensor:
    """high: a byte, the fifth bits of the eight codes."""
    high = (high & 15) | ((high & 0xF0) << 12)
    return ints_4(word, high, INDEX) | ((high << (4 - INDEX)) & 0x00100010)


@triton.jit
def ints_6(word: tl.tensor, high: tl.tensor, INDEX: tl.constexpr) -> tl.tensor:
    """high: 16 bits, the fifth and sixth of the eight codes."""
    high = (high & 0xFF) | ((high & 0xFF00) << 8)
    return ints_4(word, high, INDEX) | (_moved(high, 4 - 2 * INDEX) & 0x00300030)


@triton.jit
def e2m1(word: tl.tensor, high: tl.tensor, INDEX: tl.constexpr) -> tl.tensor:
    """2 ** -14 of the number: exponent and mantissa at the low end of the exponent's field."""
    return (_moved(word, 12 - 4 * INDEX) & 0x80008000) | (_moved(word, 9 - 4 * INDEX) & 0x0E000E00)


@triton.jit
def e4m3(word: tl.tensor, high: tl.tensor, INDEX: tl.constexpr) -> tl.tensor:
    """2 ** -8 of the number. The instruction that some GPUs have for it saves a twentieth of the instructions of a loop."""
    return (_moved(word, 8 - 8 * INDEX) & 0x80008000) | (_moved(word, 7 - 8 * INDEX) & 0x3F803F80)


@triton.jit
def e5m2(word: tl.tensor, high: tl.tensor, INDEX: tl.constexpr) -> tl.tensor:
    return _moved(word, 8 - 8 * INDEX) & 0xFF00FF00


@triton.jit
def _moved(word: tl.tensor, LEFT: tl.constexpr) -> tl.tensor:
    if LEFT > 0:
        word = word << LEFT
    elif LEFT < 0:
        word = word >> (0 - LEFT)
    return word


@triton.jit
def scale_of_ints(extra: tl.tensor) -> tl.tensor:
    """E4M3 as float16."""
    return _half((extra & 0x80) << 8 | (extra & 0x7F) << 7) * 256.0


@triton.jit
def scale_of_e2m1(extra: tl.tensor) -> tl.tensor:
    """2 ** 7 times the number, for `e2m1`; what is missing of 2 ** 14 is its `power`: the greatest scale is 448."""
    return _half((extra & 0x80) << 8 | (extra & 0x7F) << 7) * 32768.0


@triton.jit
def _half(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def low_half(word: tl.tensor) -> tl.tensor:
    return _half(word & 0xFFFF)


@triton.jit
def high_half(word: tl.tensor) -> tl.tensor:
    return _half(word >> 16)


PACKED: dict[str, PackedKernels] = {
    "int4": PackedKernels(ints_4, scale_of_ints, offset=1024.0 + 8),
    "int5": PackedKernels(ints_5, scale_of_ints, offset=1024.0 + 16),
    "int6": PackedKernels(ints_6, scale_of_ints, offset=1024.0 + 32),
    "nvfp4": PackedKernels(e2m1, scale_of_e2m1, power=128.0),
    "nvfp4_4over6": PackedKernels(e2m1, scale_of_e2m1, power=128.0),
    "fp8_e4m3": PackedKernels(e4m3, num=4, factor=256.0),
    "fp8_e5m2": PackedKernels(e5m2, num=4),
}

NOT_PACKED = PackedKernels(None)


def packed_kernels(codec: Codec, dim: int) -> PackedKernels | None:
    """How vectors of `dim` such codes are read by the word; None: they are decoded number by number."""
    found = PACKED.get(codec.name)
    return found if found is not None and dim >= MIN_DIM and dim % found.num == 0 else None

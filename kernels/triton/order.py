"""The order of float32 numbers as whole numbers, as a Triton device function: what is compared as keys is compared with it."""

from __future__ import annotations

import triton
import triton.language as tl

_NO_NUMBER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_bits(value: tl.tensor) -> tl.tensor:
    """int32 numbers in the order of the values. Zeros are equal whatever their sign; a NaN is above all, as in argmax."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, _NO_NUMBER, bits ^ ((bits >> 31) & 0x7FFFFFFF))

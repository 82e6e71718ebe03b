"""Queries, keys, values and outputs of a step as the Triton kernels take them: an address and two strides.

Parts of one product's output are read where they lie. Made by whoever launches a kernel.

Shape letters: T tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Vectors(NamedTuple):
    """[T, H, D]; the numbers of a vector lie side by side."""

    data: Any  # a Tensor; in kernels, its address
    token_stride: int
    head_stride: int


def vectors(x_THD: Tensor) -> Vectors:
    assert x_THD.stride(2) == 1, "the numbers of a vector lie side by side"
    return Vectors(x_THD, x_THD.stride(0), x_THD.stride(1))

"""Turning vectors (`kvcache.turns`) on a GPU: a device function, and a kernel for queries and for outputs.

K and V are turned by the writer. Knows matrices only; called by the writer and by the launches of attention.

Shape letters: T tokens, H heads, G kv heads, D head dim, R rows, N the head dim's next power of two,
I a slice of it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.vectors import Vectors, vectors

ROWS = 32
_SLICE = tl.constexpr(32)


class Matrices(NamedTuple):
    """float32 [G, D, D], each whole; all may be one (head_stride 0)."""

    data: Tensor
    head_stride: int


def matrices(matrix_GDD: Tensor) -> Matrices:
    assert matrix_GDD.stride(2) == 1 and matrix_GDD.stride(1) == matrix_GDD.shape[2], "a matrix lies row by row"
    return Matrices(matrix_GDD, matrix_GDD.stride(0))


@triton.jit
def turned(
    at_R: tl.tensor, is_read_R: tl.tensor, turns: Matrices, head: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """A x, float32 [R, WIDTH], for the vector x at each address, A being the matrix of the kv head; zeros beyond DIM.

    By slices, as the matrix is larger than the registers.
    """
    n_N = tl.arange(0, WIDTH)
    found_RN = tl.zeros([at_R.shape[0], WIDTH], tl.float32)
    for first in range(0, DIM, _SLICE):
        i_I = first + tl.arange(0, _SLICE)
        is_number_I = i_I < DIM
        is_number_RI, is_number_NI = is_read_R[:, None] & is_number_I[None, :], (n_N < DIM)[:, None] & is_number_I[None, :]
        x_RI = tl.load(at_R[:, None] + i_I[None, :], mask=is_number_RI, other=0.0).to(tl.float32)
        matrix = turns.data + head * turns.head_stride
        matrix_NI = tl.load(matrix + n_N[:, None] * DIM + i_I[None, :], mask=is_number_NI, other=0.0)
        x_high_RI, x_low_RI = _in_two(x_RI)
        high_NI, low_NI = _in_two(matrix_NI)
        found_RN = tl.dot(x_low_RI, tl.trans(high_NI), found_RN)
        found_RN = tl.dot(x_high_RI, tl.trans(low_NI), found_RN)
        found_RN = tl.dot(x_high_RI, tl.trans(high_NI), found_RN)
    return found_RN


@triton.jit
def _in_two(x: tl.tensor) -> tl.tuple:
    """A float32 as a sum of two bfloat16, 16 bits in all: tensor cores multiply these, and no code has more than 6."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_tokens"])
def turn_rows(
    source: Vectors,
    out: Vectors,
    turns: Matrices,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_ROWS: tl.constexpr,
) -> None:
    """Grid: groups of NUM_ROWS rows, kv heads. A row is a token and one of the HEADS heads of the kv head."""
    row_R = tl.program_id(0) * NUM_ROWS + tl.arange(0, NUM_ROWS)
    head = tl.program_id(1)
    token_R, head_R = (row_R // HEADS).to(tl.int64), head * HEADS + row_R % HEADS
    n_N = tl.arange(0, WIDTH)
    is_row_R = token_R < num_tokens
    at_R = source.data + token_R * source.token_stride + head_R * source.head_stride
    out_RN = turned(at_R, is_row_R, turns, head, DIM, WIDTH)
    out_R = out.data + token_R * out.token_stride + head_R * out.head_stride
    is_number_RN = is_row_R[:, None] & (n_N < DIM)[None, :]
    tl.store(out_R[:, None] + n_N[None, :], out_RN.to(out.data.dtype.element_ty), mask=is_number_RN)


def turn_launch(x_THD: Tensor, matrix_GDD: Tensor, out_THD: Tensor) -> Launch:
    """out = each head's vectors of x, multiplied by the matrix of its kv head; out may be x. At least one token."""
    num_tokens, num_heads, dim = x_THD.shape
    heads = num_heads // matrix_GDD.shape[0]
    grid = (triton.cdiv(num_tokens * heads, ROWS), matrix_GDD.shape[0])
    sizes = (heads, dim, triton.next_power_of_2(dim), ROWS)
    return Launch(grid, turn_rows, (vectors(x_THD), vectors(out_THD), matrices(matrix_GDD), num_tokens, *sizes))

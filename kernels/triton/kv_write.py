"""Stores K and V of a step's tokens at their slots, in any format: the Triton twin of `KVFormat.write`.

A program takes some rows, each one head of one token, of K or of V. It knows slots and strides; what the bytes are is the codec's
matter. Called by attention back ends, with K and V turned as the format wants.

Shape letters: T tokens, G kv heads, D head dim, R rows, N numbers of a row, E extra bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.numbers import FUSION_OFF, merge_pairs
from halfbyte.kernels.triton.sides import KVSide, view_sides
from halfbyte.kvcache.tensors import LayerCache

NUMBERS_PER_PROGRAM = 4096


class Vectors(NamedTuple):
    """K or V of a step, [T, G, D]; the numbers of a vector lie side by side."""

    data: Tensor
    token_stride: int
    head_stride: int


def write(k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
    """Quantise and store one token per row at its slot (int64). Rows whose slot is -1 are skipped."""
    if len(k_TGD):
        grid, kernel, arguments = launch_of(k_TGD, v_TGD, cache, slot_mapping_T)
        kernel[grid](*arguments, **FUSION_OFF)


def launch_of(
    k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor
) -> tuple[tuple[int, int], Any, tuple[Any, ...]]:
    """Grid, kernel and arguments of a `write`."""
    num_tokens, num_heads = k_TGD.shape[:2]
    k, v = view_sides(cache)
    num_rows = max(1, NUMBERS_PER_PROGRAM // max(k.width.value, v.width.value))
    grid = (triton.cdiv(num_tokens * num_heads, num_rows), 2)
    vectors = _vectors(k_TGD), _vectors(v_TGD)
    return grid, write_rows, (*vectors, k, v, slot_mapping_T, num_tokens, num_heads, cache.spec.block_size, num_rows)


def _vectors(x_TGD: Tensor) -> Vectors:
    assert x_TGD.stride(2) == 1, "the numbers of a vector lie side by side"
    return Vectors(x_TGD, x_TGD.stride(0), x_TGD.stride(1))


@triton.jit(do_not_specialize=["num_tokens"])  # which is another in each step
def write_rows(
    k_vectors: Vectors,
    v_vectors: Vectors,
    k: KVSide,
    v: KVSide,
    slots: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Grid: groups of ROWS rows, then K and V."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_R, head_R = row_R // num_heads, row_R % num_heads
    slot_R = tl.load(slots + token_R, mask=token_R < num_tokens, other=-1)
    if tl.program_id(1) == 0:
        _write_side(k_vectors, k, token_R, head_R, slot_R, BLOCK_SIZE)
    else:
        _write_side(v_vectors, v, token_R, head_R, slot_R, BLOCK_SIZE)


@triton.jit
def _write_side(
    vectors: Vectors, side: KVSide, token_R: tl.tensor, head_R: tl.tensor, slot_R: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> None:
    is_kept_R = slot_R >= 0
    number_N = tl.arange(0, side.width)
    at_R = token_R.to(tl.int64) * vectors.token_stride + head_R * vectors.head_stride
    is_number_RN = is_kept_R[:, None] & (number_N < side.dim)[None, :]
    x_RN = tl.load(vectors.data + at_R[:, None] + number_N[None, :], mask=is_number_RN, other=0.0).to(tl.float32)
    scale_R1 = tl.load(side.scale + head_R)[:, None]
    codes_RN, extra_RE = side.encode(x_RN, scale_R1, side.parameter)

    block_R, offset_R = slot_R // BLOCK_SIZE, slot_R % BLOCK_SIZE
    codes_R = side.codes + (
        block_R * side.codes_block_stride + head_R * side.codes_head_stride + offset_R * side.codes_token_stride
    )
    if side.bits < 8:
        _store(codes_R, merge_pairs(codes_RN & 15, 4), side.dim // 2, is_kept_R)
        if side.bits == 5:
            _store(codes_R + side.dim // 2, _merge_bits(codes_RN >> 4), side.dim // 8, is_kept_R)
        elif side.bits == 6:
            _store(codes_R + side.dim // 2, merge_pairs(merge_pairs(codes_RN >> 4, 2), 4), side.dim // 4, is_kept_R)
    else:
        _store(codes_R, codes_RN, side.dim, is_kept_R)
    if side.num_extra > 0:
        extra_R = side.extra + (
            block_R * side.extra_block_stride + head_R * side.extra_head_stride + offset_R * side.extra_token_stride
        )
        _store(extra_R, extra_RE, side.num_extra, is_kept_R)


@triton.jit
def _merge_bits(bits_RN: tl.tensor) -> tl.tensor:
    return merge_pairs(merge_pairs(merge_pairs(bits_RN, 1), 2), 4)


@triton.jit
def _store(row_R: tl.tensor, values_RN: tl.tensor, NUM: tl.constexpr, is_kept_R: tl.tensor) -> None:
    """The first NUM values of each row that is kept, from its address on, in the type that lies there."""
    number_N = tl.arange(0, values_RN.shape[1])
    is_stored_RN = is_kept_R[:, None] & (number_N < NUM)[None, :]
    tl.store(row_R[:, None] + number_N[None, :], values_RN.to(row_R.dtype.element_ty), mask=is_stored_RN)

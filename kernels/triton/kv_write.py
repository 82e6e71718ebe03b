"""Stores K and V of a step's tokens at their slots, in any format: the Triton twin of `KVFormat.write`.

A program takes one kv head of some tokens, of K or of V, turns it if that is asked for, and stores it. It knows slots and
strides; what the bytes are is the codec's matter. Called by attention back ends.

Shape letters: T tokens, G kv heads, D head dim, R rows (tokens), N numbers of a row, E extra bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.numbers import merge_pairs
from halfbyte.kernels.triton.sides import KVSide, view_sides
from halfbyte.kernels.triton.turns import Matrices, matrices, turned
from halfbyte.kernels.triton.vectors import Vectors, vectors
from halfbyte.kvcache.tensors import LayerCache
from halfbyte.kvcache.turns import LayerTurns

NUMBERS_PER_PROGRAM = 4096


class Turn(NamedTuple):
    """What a side's vectors are multiplied with before they are stored, and what is subtracted then, float32 [G, D].

    is_turned, is_shifted: constant; what is not used is any tensor.
    """

    matrices: Matrices
    shift: Tensor
    is_turned: Any
    is_shifted: Any


def write(k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor, turns: LayerTurns | None = None) -> None:
    """Quantise and store one token per row at its slot (int64). Rows whose slot is -1 are skipped. turns: done on the way."""
    if len(k_TGD):
        launch_of(k_TGD, v_TGD, cache, slot_mapping_T, turns).run()


def launch_of(k_TGD: Tensor, v_TGD: Tensor, cache: LayerCache, slot_mapping_T: Tensor, turns: LayerTurns | None = None) -> Launch:
    """A `write` of at least one token."""
    num_tokens, num_heads = k_TGD.shape[:2]
    k, v = view_sides(cache)
    num_rows = 16 if turns else max(16, NUMBERS_PER_PROGRAM // max(k.width.value, v.width.value))
    grid = (triton.cdiv(num_tokens, num_rows), num_heads, 2)
    turns = turns or LayerTurns()
    k_turn, v_turn = _turn(turns.k_GDD, turns.k_shift_GD, k), _turn(turns.v_GDD, None, v)
    what = (vectors(k_TGD), vectors(v_TGD), k, v, k_turn, v_turn)
    num_warps = 8 if turns.k_GDD is not None and k.width.value > 128 else 4
    return Launch(grid, write_rows, (*what, slot_mapping_T, num_tokens, cache.spec.block_size, num_rows), num_warps)


def _turn(matrix_GDD: Tensor | None, shift_GD: Tensor | None, side: KVSide) -> Turn:
    found = Matrices(side.scale, 0) if matrix_GDD is None else matrices(matrix_GDD)
    shift_GD, is_shifted = (side.scale, False) if shift_GD is None else (shift_GD.contiguous(), True)
    return Turn(found, shift_GD, tl.constexpr(matrix_GDD is not None), tl.constexpr(is_shifted))


@triton.jit(do_not_specialize=["num_tokens"])  # which is another in each step
def write_rows(
    k_vectors: Vectors,
    v_vectors: Vectors,
    k: KVSide,
    v: KVSide,
    k_turn: Turn,
    v_turn: Turn,
    slots: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Grid: groups of ROWS tokens, kv heads, then K and V."""
    token_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot_R = tl.load(slots + token_R, mask=token_R < num_tokens, other=-1)
    if tl.program_id(2) == 0:
        _write_side(k_vectors, k, k_turn, token_R, tl.program_id(1), slot_R, BLOCK_SIZE)
    else:
        _write_side(v_vectors, v, v_turn, token_R, tl.program_id(1), slot_R, BLOCK_SIZE)


@triton.jit
def _write_side(
    source: Vectors,
    side: KVSide,
    turn: Turn,
    token_R: tl.tensor,
    head: tl.tensor,
    slot_R: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    is_kept_R = slot_R >= 0
    number_N = tl.arange(0, side.width)
    at_R = token_R.to(tl.int64) * source.token_stride + head * source.head_stride
    if turn.is_turned:
        x_RN = turned(source.data + at_R, is_kept_R, turn.matrices, head, side.dim, side.width)
    else:
        is_number_RN = is_kept_R[:, None] & (number_N < side.dim)[None, :]
        x_RN = tl.load(source.data + at_R[:, None] + number_N[None, :], mask=is_number_RN, other=0.0).to(tl.float32)
    if turn.is_shifted:
        x_RN -= tl.load(turn.shift + head * side.dim + number_N, mask=number_N < side.dim, other=0.0)[None, :]
    scale_R1 = tl.load(side.scale + head + token_R * 0)[:, None]
    codes_RN, extra_RE = side.encode(x_RN, scale_R1, side.parameter)

    block_R, offset_R = slot_R // BLOCK_SIZE, slot_R % BLOCK_SIZE
    codes_R = side.codes + (
        block_R * side.codes_block_stride + head * side.codes_head_stride + offset_R * side.codes_token_stride
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
        STEP: tl.constexpr = side.extra_step
        place_R = offset_R // STEP * (STEP * side.extra_token_stride) + offset_R % STEP
        extra_R = side.extra + (block_R * side.extra_block_stride + head * side.extra_head_stride + place_R)
        _store(extra_R, extra_RE, side.num_extra, is_kept_R, STEP)


@triton.jit
def _merge_bits(bits_RN: tl.tensor) -> tl.tensor:
    return merge_pairs(merge_pairs(merge_pairs(bits_RN, 1), 2), 4)


@triton.jit
def _store(row_R: tl.tensor, values_RN: tl.tensor, NUM: tl.constexpr, is_kept_R: tl.tensor, STEP: tl.constexpr = 1) -> None:
    """The first NUM values of each row that is kept, STEP apart from its address on, in the type that lies there."""
    number_N = tl.arange(0, values_RN.shape[1])
    is_stored_RN = is_kept_R[:, None] & (number_N < NUM)[None, :]
    tl.store(row_R[:, None] + number_N[None, :] * STEP, values_RN.to(row_R.dtype.element_ty), mask=is_stored_RN)

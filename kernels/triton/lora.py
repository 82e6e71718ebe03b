"""Low-rank adapters in Triton: the twin of `kernels.lora`, for batches in which each token may have another adapter or none.

A tile of tokens goes through the adapters that occur in it, one after another; a token takes the result of its own. How inputs
are cut depends on their number alone, so that a token's order of sums depends on nothing beside it. Seats are read on the device:
the same launches serve every batch of a size, and tiles without adapters end at once. Knows tensors only. Called through
`TritonLayers`.

Shape letters: T tokens, E inputs, O outputs, P parts, S seats, R the highest rank, N = P * R, K pieces of the inputs; in kernels
M tokens of a tile, C numbers with padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.lora import StackedLora
from halfbyte.kernels.triton.launch import Launch

# Tokens and outputs of a tile, inputs at a time, inputs of a piece: decoding shares a token's inputs out among programs.
_TOKENS, _OUTPUTS, _INPUTS, _PIECE = 16, 64, 64, 512
_LEAST_RANK = 16  # of an operand of tensor cores


def add_lora(y_TO: Tensor, x_TE: Tensor, lora: StackedLora, seat_T: Tensor) -> Tensor:
    """As the law, in place."""
    if len(y_TO):
        h_KTN = x_TE.new_empty(_num_pieces(x_TE.shape[1]), len(x_TE), lora.a_SNE.shape[1], dtype=torch.float32)
        shrink_launch(x_TE, lora, seat_T, h_KTN).run()
        for launch in expand_launches(h_KTN, lora, seat_T, y_TO):
            launch.run()
    return y_TO


def shrink_launch(x_TE: Tensor, lora: StackedLora, seat_T: Tensor, h_KTN: Tensor) -> Launch:
    """h = x A^T of each token's adapter, for each piece of the inputs by itself."""
    assert x_TE.stride(1) == 1 and x_TE.dtype == lora.a_SNE.dtype
    num_tokens, num_inputs = x_TE.shape
    width = lora.a_SNE.shape[1]
    ranks = max(_LEAST_RANK, min(64, triton.next_power_of_2(width)))
    grid = (triton.cdiv(num_tokens, _TOKENS), len(h_KTN), triton.cdiv(width, ranks))
    sizes = num_tokens, x_TE.stride(0), num_inputs, width
    return Launch(grid, shrink, (x_TE, lora.a_SNE, seat_T, h_KTN, *sizes, _TOKENS, ranks, _INPUTS, _PIECE))


def expand_launches(h_KTN: Tensor, lora: StackedLora, seat_T: Tensor, y_TO: Tensor) -> list[Launch]:
    """y += (scale * h) B^T, part by part."""
    assert y_TO.is_contiguous()
    num_pieces, num_tokens, _ = h_KTN.shape
    rank, num_parts, num_outputs = lora.max_rank, len(lora.outputs), y_TO.shape[1]
    width = max(_LEAST_RANK, triton.next_power_of_2(rank))
    launches, first = [], 0
    for part, outputs in enumerate(lora.outputs):
        grid = (triton.cdiv(num_tokens, _TOKENS), triton.cdiv(outputs, _OUTPUTS))
        sizes = num_tokens, num_outputs, first, outputs, part, num_parts, rank
        arguments = (h_KTN, lora.b_SOR, lora.scale_SP, seat_T, y_TO, *sizes, num_pieces, _TOKENS, _OUTPUTS, width)
        launches.append(Launch(grid, expand, arguments))
        first += outputs
    return launches


def _num_pieces(num_inputs: int) -> int:
    return triton.cdiv(num_inputs, _PIECE)


@triton.jit(do_not_specialize=["num_tokens"])
def shrink(
    x: tl.tensor,
    a: tl.tensor,
    seats: tl.tensor,
    h: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    num_inputs: tl.tensor,
    num_ranks: tl.tensor,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    """Grid: tiles of tokens, pieces of the inputs, parts of the ranks."""
    token_M = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token_M = token_M < num_tokens
    seat_M = tl.load(seats + token_M, mask=is_token_M, other=0)
    seat = tl.max(seat_M, 0)
    if seat == 0:
        return
    rank_C = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    is_rank_C1 = (rank_C < num_ranks)[:, None]
    first = tl.program_id(1) * PIECE
    last = tl.minimum(first + PIECE, num_inputs)
    from_M1 = x + (token_M.to(tl.int64) * x_stride)[:, None]
    result_MC = tl.zeros([TOKENS, RANKS], tl.float32)
    left_M = seat_M
    while seat > 0:
        from_C1 = a + (((seat - 1).to(tl.int64) * num_ranks + rank_C) * num_inputs)[:, None]
        sum_MC = tl.zeros([TOKENS, RANKS], tl.float32)
        for start in range(first, last, INPUTS):
            input_1N = (start + tl.arange(0, INPUTS))[None, :]
            x_MN = tl.load(from_M1 + input_1N, mask=is_token_M[:, None] & (input_1N < last), other=0.0)
            a_CN = tl.load(from_C1 + input_1N, mask=is_rank_C1 & (input_1N < last), other=0.0)
            sum_MC = tl.dot(x_MN, tl.trans(a_CN), sum_MC, input_precision="ieee")
        result_MC = tl.where((seat_M == seat)[:, None], sum_MC, result_MC)
        left_M = tl.where(left_M == seat, 0, left_M)
        seat = tl.max(left_M, 0)
    to_M1 = ((tl.program_id(1).to(tl.int64) * num_tokens + token_M) * num_ranks)[:, None]
    tl.store(h + to_M1 + rank_C[None, :], result_MC, mask=(seat_M > 0)[:, None] & (rank_C < num_ranks)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def expand(
    h: tl.tensor,
    b: tl.tensor,
    scales: tl.tensor,
    seats: tl.tensor,
    y: tl.tensor,
    num_tokens: tl.tensor,
    num_columns: tl.tensor,
    first_column: tl.tensor,
    num_outputs: tl.tensor,
    part: tl.tensor,
    num_parts: tl.tensor,
    rank: tl.tensor,
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """Grid: tiles of tokens, tiles of one part's outputs."""
    token_M = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token_M = token_M < num_tokens
    seat_M = tl.load(seats + token_M, mask=is_token_M, other=0)
    seat = tl.max(seat_M, 0)
    if seat == 0:
        return
    rank_1R = tl.arange(0, RANKS)[None, :]
    has_seat_M1 = (seat_M > 0)[:, None]
    h_MR = tl.zeros([TOKENS, RANKS], tl.float32)
    for piece in tl.static_range(PIECES):
        from_M1 = ((piece * num_tokens + token_M).to(tl.int64) * num_parts + part)[:, None] * rank
        h_MR += tl.load(h + from_M1 + rank_1R, mask=has_seat_M1 & (rank_1R < rank), other=0.0)
    scale_M = tl.load(scales + (seat_M - 1) * num_parts + part, mask=seat_M > 0, other=0.0)
    kind = b.dtype.element_ty
    h_MR = (h_MR * scale_M[:, None]).to(kind)

    output_C = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output_C = output_C < num_outputs
    column_C = first_column + output_C
    result_MC = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    left_M = seat_M
    while seat > 0:
        from_C1 = b + (((seat - 1).to(tl.int64) * num_columns + column_C) * rank)[:, None]
        b_CR = tl.load(from_C1 + rank_1R, mask=is_output_C[:, None] & (rank_1R < rank), other=0.0)
        sum_MC = tl.dot(h_MR, tl.trans(b_CR), input_precision="ieee")
        result_MC = tl.where((seat_M == seat)[:, None], sum_MC, result_MC)
        left_M = tl.where(left_M == seat, 0, left_M)
        seat = tl.max(left_M, 0)
    at_MC = token_M.to(tl.int64)[:, None] * num_columns + column_C[None, :]
    is_number_MC = has_seat_M1 & is_output_C[None, :]
    y_MC = tl.load(y + at_MC, mask=is_number_MC, other=0.0).to(tl.float32)
    tl.store(y + at_MC, (y_MC + result_MC).to(y.dtype.element_ty), mask=is_number_MC)

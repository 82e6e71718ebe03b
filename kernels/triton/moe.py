"""Mixture of experts in Triton: the twins of `kernels.moe`, for weights in the model's dtype.

Pairs of a token and one of its experts are put in the order of their experts, each expert's filled up to whole tiles; a product
then takes a tile and one expert's matrix. Tiles are of one size, whatever the batch, and sums go over the inputs in one order: a
token's result depends on no other. Knows tensors only.

Shape letters: T tokens, X experts, K experts of a token, P = T * K pairs, S places in the order of experts, M tiles, E hidden,
J = 2 * intermediate; in kernels R rows, C numbers with padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.moe import Routing
from halfbyte.kernels.triton import activation
from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.order import order_bits

# Pairs, outputs and inputs of a tile. For few tokens reading the weights takes longer than products of a tile that is not full.
_TILE, _OUTPUTS, _INPUTS = 64, 64, 64
_SCORES_PER_PROGRAM = 512
_PAIRS_AT_A_TIME = 1024
_COLUMNS = 1024

_LOWEST = tl.constexpr(-(1 << 63))


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """pair_S: pairs t * K + k in the order of their experts, P where a tile has none. expert_M: of each tile, -1 for no tile."""

    pair_S: Tensor
    expert_M: Tensor


def route(logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the law."""
    shape = len(logits_TX), routing.num_chosen
    weights_TK = torch.empty(shape, dtype=torch.float32, device=logits_TX.device)
    experts_TK = torch.empty(shape, dtype=torch.int64, device=logits_TX.device)
    if len(logits_TX):
        route_launch(logits_TX, routing, bias_X, weights_TK, experts_TK).run()
    return weights_TK, experts_TK


def mix_experts(
    x_TE: Tensor, gate_up_XJE: Tensor, down_XEI: Tensor, weights_TK: Tensor, experts_TK: Tensor, hidden_act: str
) -> Tensor:
    """As the law; the weights are contiguous."""
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    if not len(x_TE):
        return out_TE
    num_pairs, num_chosen = experts_TK.numel(), experts_TK.shape[1]
    order = sort_by_expert(experts_TK, len(gate_up_XJE))
    both_PJ, made_PE = (x_TE.new_empty(num_pairs, weight.shape[1]) for weight in (gate_up_XJE, down_XEI))
    product_launch(x_TE, gate_up_XJE, order, num_chosen, both_PJ).run()
    product_launch(activation.gated(hidden_act, both_PJ), down_XEI, order, 1, made_PE).run()
    sum_launch(made_PE, weights_TK, out_TE).run()
    return out_TE


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> ExpertOrder:
    num_pairs = experts_TK.numel()
    num_tiles = min(num_pairs, num_pairs // _TILE + num_experts)  # at most
    count_X, pair_S, expert_M = (
        torch.empty(size, dtype=torch.int32, device=experts_TK.device) for size in (num_experts, num_tiles * _TILE, num_tiles)
    )
    for launch in sort_launches(experts_TK, count_X, pair_S, expert_M):
        launch.run()
    return ExpertOrder(pair_S, expert_M)


def route_launch(logits_TX: Tensor, routing: Routing, bias_X: Tensor | None, weights_TK: Tensor, experts_TK: Tensor) -> Launch:
    assert logits_TX.stride(1) == 1
    num_tokens, num_experts = logits_TX.shape
    width = triton.next_power_of_2(num_experts)
    rows = max(1, _SCORES_PER_PROGRAM // width)
    constants = num_experts, width, routing.num_chosen, triton.next_power_of_2(routing.num_chosen), rows
    kinds = routing.by_sigmoid, routing.renormalises
    arguments = (logits_TX, logits_TX.stride(0), bias_X, weights_TK, experts_TK, num_tokens, routing.scale, *constants, *kinds)
    return Launch((triton.cdiv(num_tokens, rows),), choose_experts, arguments)


def sort_launches(experts_TK: Tensor, count_X: Tensor, pair_S: Tensor, expert_M: Tensor) -> list[Launch]:
    assert experts_TK.is_contiguous()
    num_pairs, num_experts, width = experts_TK.numel(), len(count_X), triton.next_power_of_2(len(count_X))
    place = (experts_TK, count_X, pair_S, expert_M, num_pairs, len(expert_M), num_experts, width, _TILE, _PAIRS_AT_A_TIME)
    return [
        Launch((num_experts,), count_pairs, (experts_TK, count_X, num_pairs, _PAIRS_AT_A_TIME)),
        Launch((num_experts,), place_pairs, place),
    ]


def product_launch(x_RE: Tensor, weight_XOE: Tensor, order: ExpertOrder, pairs_per_row: int, out_PO: Tensor) -> Launch:
    """x @ weight^T of each pair's expert; pairs_per_row: how many pairs share a row of x."""
    assert x_RE.is_contiguous() and weight_XOE.is_contiguous() and x_RE.dtype == weight_XOE.dtype
    _, num_outputs, num_inputs = weight_XOE.shape
    grid = (len(order.expert_M), triton.cdiv(num_outputs, _OUTPUTS))
    sizes = len(out_PO), num_outputs, num_inputs, pairs_per_row
    return Launch(grid, multiply_tile, (x_RE, weight_XOE, order.pair_S, order.expert_M, out_PO, *sizes, _TILE, _OUTPUTS, _INPUTS))


def sum_launch(made_PE: Tensor, weights_TK: Tensor, out_TE: Tensor) -> Launch:
    num_tokens, hidden = out_TE.shape
    arguments = (made_PE, weights_TK, out_TE, hidden, weights_TK.shape[1], _COLUMNS)
    return Launch((num_tokens, triton.cdiv(hidden, _COLUMNS)), sum_experts, arguments)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_experts(
    logits: tl.tensor,
    stride: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    num_tokens: tl.tensor,
    scale: tl.tensor,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
    RENORMALISES: tl.constexpr,
) -> None:
    """Grid: groups of ROWS tokens. bias: None for none."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert_C = tl.arange(0, WIDTH)
    is_expert_RC = (row_R < num_tokens)[:, None] & (expert_C < EXPERTS)[None, :]
    at_RC = row_R.to(tl.int64)[:, None] * stride + expert_C[None, :]
    logit_RC = tl.load(logits + at_RC, mask=is_expert_RC, other=float("-inf")).to(tl.float32)
    if BY_SIGMOID:
        score_RC = tl.div_rn(1.0, 1.0 + tl.exp(-logit_RC))
    else:
        share_RC = tl.exp(logit_RC - tl.max(logit_RC, 1, keep_dims=True))
        score_RC = tl.div_rn(share_RC, tl.broadcast_to(tl.sum(share_RC, 1, keep_dims=True), share_RC.shape))
    wanted_RC = score_RC
    if bias is not None:
        wanted_RC += tl.load(bias + expert_C, mask=expert_C < EXPERTS, other=0.0)[None, :]
    key_RC = (order_bits(wanted_RC).to(tl.int64) << 32) | (EXPERTS - 1 - expert_C)[None, :].to(tl.int64)
    key_RC = tl.where((expert_C < EXPERTS)[None, :], key_RC, _LOWEST)

    k_K = tl.arange(0, CHOSEN_WIDTH)
    weight_RK = tl.zeros([ROWS, CHOSEN_WIDTH], tl.float32)
    chosen_RK = tl.zeros([ROWS, CHOSEN_WIDTH], tl.int64)
    total_R1 = tl.zeros([ROWS, 1], tl.float32)
    for k in tl.static_range(CHOSEN):
        best_R1 = tl.max(key_RC, 1, keep_dims=True)
        is_best_RC = key_RC == best_R1
        best_weight_R1 = tl.sum(tl.where(is_best_RC, score_RC, 0.0), 1, keep_dims=True)
        weight_RK = tl.where((k_K == k)[None, :], best_weight_R1, weight_RK)
        chosen_RK = tl.where((k_K == k)[None, :], (EXPERTS - 1) - (best_R1 & 0xFFFFFFFF), chosen_RK)
        total_R1 += best_weight_R1
        key_RC = tl.where(is_best_RC, _LOWEST, key_RC)
    if RENORMALISES:
        weight_RK = tl.div_rn(weight_RK, tl.broadcast_to(total_R1 + 1e-20, weight_RK.shape))
    to_RK = row_R.to(tl.int64)[:, None] * CHOSEN + k_K[None, :]
    is_chosen_RK = (row_R < num_tokens)[:, None] & (k_K < CHOSEN)[None, :]
    tl.store(weights + to_RK, weight_RK * scale, mask=is_chosen_RK)
    tl.store(experts + to_RK, chosen_RK, mask=is_chosen_RK)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(experts: tl.tensor, counts: tl.tensor, num_pairs: tl.tensor, AT_A_TIME: tl.constexpr) -> None:
    """Grid: experts."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, num_pairs, AT_A_TIME):
        pair = start + tl.arange(0, AT_A_TIME)
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        count += tl.sum((expert == tl.program_id(0)).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0), count)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def place_pairs(
    experts: tl.tensor,
    counts: tl.tensor,
    places: tl.tensor,
    expert_of_tile: tl.tensor,
    num_pairs: tl.tensor,
    max_tiles: tl.tensor,
    num_experts: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    AT_A_TIME: tl.constexpr,
) -> None:
    """Grid: experts. Each fills its own tiles; the last one also says which tiles nobody has."""
    mine = tl.program_id(0)
    expert_C = tl.arange(0, WIDTH)
    tiles_C = tl.cdiv(tl.load(counts + expert_C, mask=expert_C < num_experts, other=0), TILE)
    first_tile = tl.sum(tl.where(expert_C < mine, tiles_C, 0), 0)
    end_tile = first_tile + tl.sum(tl.where(expert_C == mine, tiles_C, 0), 0)
    for tile in range(first_tile, end_tile):
        tl.store(expert_of_tile + tile, mine)
    if mine == num_experts - 1:
        for tile in range(end_tile, max_tiles):
            tl.store(expert_of_tile + tile, -1)

    place = first_tile * TILE
    for start in range(0, num_pairs, AT_A_TIME):
        pair = start + tl.arange(0, AT_A_TIME)
        is_mine = (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == mine).to(tl.int32)
        tl.store(places + place + tl.cumsum(is_mine, 0) - 1, pair, mask=is_mine != 0)
        place += tl.sum(is_mine, 0)
    rest = place + tl.arange(0, TILE)
    tl.store(places + rest, tl.zeros([TILE], tl.int32) + num_pairs, mask=rest < end_tile * TILE)


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_tile(
    x: tl.tensor,
    weights: tl.tensor,
    places: tl.tensor,
    experts: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    PAIRS_PER_ROW: tl.constexpr,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Grid: tiles, parts of the outputs."""
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair_R = tl.load(places + tl.program_id(0) * TILE + tl.arange(0, TILE))
    is_pair_R1 = (pair_R < num_pairs)[:, None]
    output_C = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output_C1 = (output_C < num_outputs)[:, None]
    from_R1 = x + ((pair_R // PAIRS_PER_ROW).to(tl.int64) * num_inputs)[:, None]
    weights_C1 = weights + ((expert * num_outputs + output_C) * num_inputs)[:, None]
    sum_RC = tl.zeros([TILE, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        input_1N = (start + tl.arange(0, INPUTS))[None, :]
        x_RN = tl.load(from_R1 + input_1N, mask=is_pair_R1 & (input_1N < num_inputs), other=0.0)
        weight_CN = tl.load(weights_C1 + input_1N, mask=is_output_C1 & (input_1N < num_inputs), other=0.0)
        sum_RC = tl.dot(x_RN, tl.trans(weight_CN), sum_RC, input_precision="ieee")
    to_RC = pair_R.to(tl.int64)[:, None] * num_outputs + output_C[None, :]
    tl.store(out + to_RC, sum_RC.to(out.dtype.element_ty), mask=is_pair_R1 & (output_C < num_outputs)[None, :])


@triton.jit
def sum_experts(
    made: tl.tensor, weights: tl.tensor, out: tl.tensor, hidden: tl.tensor, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """Grid: tokens, parts of the hidden size. In the order in which the experts were chosen."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(CHOSEN):
        pair = token * CHOSEN + k
        total += tl.load(made + pair * hidden + column, mask=column < hidden, other=0.0).to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)

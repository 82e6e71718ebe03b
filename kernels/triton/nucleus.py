"""Top-k, top-p, min-p and the choice for rows that few candidates do not settle, in Triton: without a sort, without the host.

The law is `kernels.sampling.choose_unsettled_`, which sorts. What its filters keep is all above some key of the law's order, and
that key is found by halving: a program takes a row, and weighs what lies above the middle until one token is left
between the bounds. Masses are whole numbers of 2^-40 of the greatest, so that no order of sums can be seen. Rows that are
settled cost a glance. Knows tensors; knows no requests. Called by the sampler of a GPU.

Shape letters: R rows of logits, N rows that are asked for, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.noise import gumbel
from halfbyte.kernels.triton.order import order_bits

_TOKENS_AT_A_TIME = 4096
_NUM_WARPS = 16
_UNIT = tl.constexpr(2.0**40)


def choose_unsettled_(
    token_N: Tensor,
    settled_N: Tensor,
    logits_RV: Tensor,
    at_N: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
) -> None:
    """As the law: overwrites the tokens (int64) of rows that are not settled with the choice among all that filters keep."""
    if len(at_N):
        filters = top_k_N, top_p_N, min_p_N
        launch_of(token_N, settled_N, logits_RV, at_N, temperature_N, *filters, seed_N, position_N).run()


def launch_of(
    token_N: Tensor,
    settled_N: Tensor,
    logits_RV: Tensor,
    at_N: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
) -> Launch:
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    assert token_N.is_contiguous() and settled_N.is_contiguous()
    numbers = (x_N.contiguous() for x_N in (temperature_N, top_k_N, top_p_N, min_p_N, seed_N, position_N))
    width = logits_RV.shape[1]
    id_bits = (width - 1).bit_length()
    arguments = (token_N, settled_N, logits_RV, logits_RV.stride(0), at_N.contiguous(), *numbers, width)
    return Launch((len(at_N),), choose_row, (*arguments, id_bits, _TOKENS_AT_A_TIME), _NUM_WARPS)


@triton.jit(do_not_specialize_on_alignment=["at", "temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"])
def choose_row(
    tokens: tl.tensor,
    settled: tl.tensor,
    logits: tl.tensor,
    stride: tl.tensor,
    at: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    width: tl.tensor,
    ID_BITS: tl.constexpr,
    NUM: tl.constexpr,
) -> None:
    """Grid: rows that are asked for."""
    n = tl.program_id(0)
    if tl.load(settled + n):
        return
    row, temperature = logits + tl.load(at + n) * stride, tl.load(temperatures + n)
    top_k, top_p, min_p = tl.load(top_ks + n), tl.load(top_ps + n), tl.load(min_ps + n)

    greatest = tl.full([], float("-inf"), tl.float32)
    most = tl.full([], -(1 << 62), tl.int64)
    for start in range(0, width, NUM):
        value, key = _values(row, temperature, start, width, ID_BITS, NUM)
        greatest = tl.maximum(greatest, tl.max(value, 0))
        most = tl.maximum(most, tl.max(key, 0))

    # What is kept lies above `bound`; min_p = 0 asks for at least -inf.
    least = greatest + tl.log(min_p.to(tl.float32))
    bound = (order_bits(least).to(tl.int64) << ID_BITS) - 1
    if (top_k > 0) & (top_k < width):
        bound = _cut(row, temperature, width, greatest, bound, most, top_k.to(tl.float64), False, ID_BITS, NUM)
    if top_p < 1.0:
        count, mass = _weigh(row, temperature, width, greatest, bound, ID_BITS, NUM)
        bound = _cut(row, temperature, width, greatest, bound, most, top_p * mass.to(tl.float64), True, ID_BITS, NUM)

    seed, position = tl.load(seeds + n), tl.load(positions + n)
    best = tl.full([], -(1 << 62), tl.int64)
    for start in range(0, width, NUM):
        value, key = _values(row, temperature, start, width, ID_BITS, NUM)
        token = start + tl.arange(0, NUM)
        noisy = _key(gumbel(seed, position, token) + value, token, width, ID_BITS)
        best = tl.maximum(best, tl.max(tl.where(key > bound, noisy, -(1 << 62)), 0))
    tl.store(tokens + n, (width - 1) - (best & ((1 << ID_BITS) - 1)))


@triton.jit
def _key(value: tl.tensor, token: tl.tensor, width: tl.tensor, ID_BITS: tl.constexpr) -> tl.tensor:
    """The order of `ordered_top` with as few bits as the ids need, so that halving ends early; -2^62 beyond the row."""
    key = (order_bits(value).to(tl.int64) << ID_BITS) | (width - 1 - token).to(tl.int64)
    return tl.where(token < width, key, -(1 << 62))


@triton.jit
def _values(
    row: tl.tensor, temperature: tl.tensor, start: tl.tensor, width: tl.tensor, ID_BITS: tl.constexpr, NUM: tl.constexpr
) -> tl.tuple:
    """Values and keys of NUM tokens from `start` on."""
    token = start + tl.arange(0, NUM)
    value = tl.div_rn(tl.load(row + token, mask=token < width, other=float("-inf")), temperature)
    return value, _key(value, token, width, ID_BITS)


@triton.jit
def _weigh(
    row: tl.tensor,
    temperature: tl.tensor,
    width: tl.tensor,
    greatest: tl.tensor,
    bound: tl.tensor,
    ID_BITS: tl.constexpr,
    NUM: tl.constexpr,
) -> tl.tuple:
    """(number, mass) of the tokens above `bound`."""
    count, mass = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, width, NUM):
        value, key = _values(row, temperature, start, width, ID_BITS, NUM)
        count += tl.sum((key > bound).to(tl.int64), 0)
        mass += tl.sum(tl.where(key > bound, (tl.exp(value - greatest) * _UNIT).to(tl.int64), 0), 0)
    return count, mass


@triton.jit
def _cut(
    row: tl.tensor,
    temperature: tl.tensor,
    width: tl.tensor,
    greatest: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    ID_BITS: tl.constexpr,
    NUM: tl.constexpr,
) -> tl.tensor:
    """Of the tokens above `low`, the fewest whose number, or mass, reaches the target, are those above the result.

    high: the greatest key, which is kept in any case. A token is kept if what lies above it does not reach the target: so all
    from `high` on are, and none up to `low`, unless all are. With one token between them nothing is left to find.
    """
    num_low, _ = _weigh(row, temperature, width, greatest, low, ID_BITS, NUM)
    num_high = tl.full([], 0, tl.int64)
    while num_low - num_high > 1:
        middle = low + (high - low) // 2
        count, mass = _weigh(row, temperature, width, greatest, middle, ID_BITS, NUM)
        weight = mass if BY_MASS else count
        reaches = weight.to(tl.float64) >= target
        low, num_low = tl.where(reaches, middle, low), tl.where(reaches, count, num_low)
        high, num_high = tl.where(reaches, high, middle), tl.where(reaches, num_high, count)
    return low

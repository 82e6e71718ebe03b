"""Choosing tokens in Triton: what the sampler wants of a device, twins of the laws in `kernels.sampling`.

A row is cut into parts, a program each, so that one row fills a GPU; a second kernel puts the parts together. What is compared
is an integer key whose greatest is the law's first of the largest, so that no order can be seen; what is summed is summed in
float64, in an order that the vocabulary alone decides. Nothing waits for the device. What rows ask may be a row of a table that
is aligned for some sizes of the batch only: nothing is compiled anew for that. Knows tensors; knows no requests.

Shape letters: R rows of logits, N rows that are asked for, V vocabulary, K candidates, P parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.sampling import rows_at_a_time
from halfbyte.kernels.triton.filters import count_kept
from halfbyte.kernels.triton.launch import Launch
from halfbyte.kernels.triton.noise import gumbel
from halfbyte.kernels.triton.nucleus import choose_unsettled_
from halfbyte.kernels.triton.order import order_bits
from halfbyte.kernels.triton.penalties import penalise_

PART = 2048  # tokens of a program

_LOWEST = tl.constexpr(-(1 << 63))
_BITS_OF_INF = tl.constexpr(0x7F800000)


class TritonSampling:
    """Implements the sampler's `SamplingKernels`, which says what the functions return."""

    max_candidates = 1 << 24
    count_kept = staticmethod(count_kept)
    penalise_ = staticmethod(penalise_)
    choose_unsettled_ = staticmethod(choose_unsettled_)

    def best(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        token_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
        finite_R = torch.empty(len(logits_RV), dtype=torch.bool, device=logits_RV.device)
        _run(best_launches(logits_RV, token_R, finite_R))
        return token_R, finite_R

    def noisy_best(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        token_N = torch.empty_like(at_N)
        noise = seed_N.contiguous(), position_N.contiguous()
        _run(best_launches(logits_RV, token_N, None, at_N, temperature_N, *noise))
        return token_N

    def gumbel_noise(self, seed_N: Tensor, position_N: Tensor, ids_NK: Tensor) -> Tensor:
        noise_NK = torch.empty(ids_NK.shape, dtype=torch.float32, device=ids_NK.device)
        _run([noise_launch(seed_N.contiguous(), position_N.contiguous(), ids_NK.contiguous(), noise_NK)])
        return noise_NK

    def ordered_top(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        values_NK = torch.empty(len(at_N), count, dtype=torch.float32, device=logits_RV.device)
        ids_NK = torch.empty(len(at_N), count, dtype=torch.int64, device=logits_RV.device)
        width, step = logits_RV.shape[1], rows_at_a_time(logits_RV)
        for start in range(0, len(at_N), step):
            some = slice(start, start + step)
            rows = at_N[some], None if temperature_N is None else temperature_N[some]
            key_NV = torch.empty(len(rows[0]), width, dtype=torch.int64, device=logits_RV.device)
            _run([key_launch(logits_RV, *rows, key_NV)])
            whole = count >= width
            top_NK = key_NV.sort(dim=1, descending=True).values if whole else key_NV.topk(count, dim=1).values
            _run([open_launch(logits_RV, *rows, top_NK, values_NK[some], ids_NK[some])])
        return values_NK, ids_NK

    def log_normaliser(self, logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None) -> Tensor:
        normaliser_N = torch.empty(len(at_N), dtype=torch.float64, device=logits_RV.device)
        _run(normaliser_launches(logits_RV, at_N, temperature_N, normaliser_N))
        return normaliser_N

    def rank(self, logits_RV: Tensor, token_R: Tensor) -> Tensor:
        rank_R = torch.ones_like(token_R)
        _run([rank_launch(logits_RV, token_R.contiguous(), rank_R)])
        return rank_R


def _run(launches: list[Launch]) -> None:
    for launch in launches:
        if all(launch.grid):
            launch.run()


def best_launches(
    logits_RV: Tensor,
    token_N: Tensor,
    finite_N: Tensor | None,
    at_N: Tensor | None = None,
    temperature_N: Tensor | None = None,
    seed_N: Tensor | None = None,
    position_N: Tensor | None = None,
) -> list[Launch]:
    """The best of each part, then of each row. Without seeds there is no noise, without `at` all rows are asked for."""
    num_rows, num_parts = len(token_N), triton.cdiv(logits_RV.shape[1], PART)
    key_NP = torch.empty(num_rows, num_parts, dtype=torch.int64, device=logits_RV.device)
    parts = (*_rows(logits_RV, at_N, temperature_N), seed_N, position_N, key_NP, PART)
    rows = (key_NP, token_N, finite_N, num_parts, logits_RV.shape[1], triton.next_power_of_2(num_parts))
    return [Launch((num_rows, num_parts), best_of_part, parts), Launch((num_rows,), best_of_row, rows, 1)]


def noise_launch(seed_N: Tensor, position_N: Tensor, ids_NK: Tensor, noise_NK: Tensor) -> Launch:
    num_rows, count = ids_NK.shape
    width = min(PART, max(128, triton.next_power_of_2(count)))
    return Launch((num_rows, triton.cdiv(count, width)), make_noise, (seed_N, position_N, ids_NK, noise_NK, count, width))


def key_launch(logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, key_NV: Tensor) -> Launch:
    grid = (len(at_N), triton.cdiv(logits_RV.shape[1], PART))
    return Launch(grid, make_keys, (*_rows(logits_RV, at_N, temperature_N), key_NV, PART))


def open_launch(
    logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, key_NK: Tensor, values_NK: Tensor, ids_NK: Tensor
) -> Launch:
    count = key_NK.shape[1]
    width = min(PART, max(128, triton.next_power_of_2(count)))
    arguments = (*_rows(logits_RV, at_N, temperature_N), key_NK.contiguous(), values_NK, ids_NK, count, width)
    return Launch((len(at_N), triton.cdiv(count, width)), open_keys, arguments)


def normaliser_launches(logits_RV: Tensor, at_N: Tensor, temperature_N: Tensor | None, normaliser_N: Tensor) -> list[Launch]:
    num_rows, num_parts = len(at_N), triton.cdiv(logits_RV.shape[1], PART)
    most_NP = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits_RV.device)
    sum_NP = torch.empty(num_rows, num_parts, dtype=torch.float64, device=logits_RV.device)
    parts = (*_rows(logits_RV, at_N, temperature_N), most_NP, sum_NP, PART)
    rows = (most_NP, sum_NP, normaliser_N, num_parts, triton.next_power_of_2(num_parts))
    return [Launch((num_rows, num_parts), sum_of_part, parts), Launch((num_rows,), sum_of_row, rows, 1)]


def rank_launch(logits_RV: Tensor, token_R: Tensor, rank_R: Tensor) -> Launch:
    """Adds to `rank_R`, which begins with ones."""
    grid = (len(token_R), triton.cdiv(logits_RV.shape[1], PART))
    return Launch(grid, count_larger, (logits_RV, logits_RV.stride(0), logits_RV.shape[1], token_R, rank_R, PART))


def _rows(
    logits_RV: Tensor, at_N: Tensor | None, temperature_N: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, int, int]:
    """What `_load` takes: logits, places, divisors, stride, width."""
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1
    assert at_N is None or (at_N.dtype == torch.int64 and at_N.is_contiguous())
    assert temperature_N is None or (temperature_N.dtype == torch.float32 and temperature_N.is_contiguous())
    return logits_RV, at_N, temperature_N, logits_RV.stride(0), logits_RV.shape[1]


@triton.jit
def _load(
    logits: tl.tensor, at: tl.tensor, temperature: tl.tensor, stride: tl.tensor, token: tl.tensor, is_token: tl.tensor
) -> tl.tensor:
    """The logits of these tokens in the row of this program, scaled; -inf where `is_token` is false."""
    n = tl.program_id(0)
    row = n.to(tl.int64) if at is None else tl.load(at + n)
    value = tl.load(logits + row * stride + token, mask=is_token, other=float("-inf"))
    if temperature is not None:
        value = tl.div_rn(value, tl.load(temperature + n))
    return value


@triton.jit
def _key(value: tl.tensor, token: tl.tensor, width: tl.tensor) -> tl.tensor:
    """The law's key in `ordered_top`: greater for greater values, of equal ones for lower ids."""
    return (order_bits(value).to(tl.int64) << 32) | (width - 1 - token).to(tl.int64)


@triton.jit
def _token_of(key: tl.tensor, width: tl.tensor) -> tl.tensor:
    return (width - 1) - (key & 0xFFFFFFFF)


@triton.jit(do_not_specialize_on_alignment=["at", "temperature", "seeds", "positions"])
def best_of_part(
    logits: tl.tensor,
    at: tl.tensor,
    temperature: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    PART: tl.constexpr,
) -> None:
    """Grid: rows, parts. keys: int64 [N, P]."""
    n = tl.program_id(0)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    is_token = token < width
    value = _load(logits, at, temperature, stride, token, is_token)
    if seeds is not None:
        value = gumbel(tl.load(seeds + n), tl.load(positions + n), token) + value
    key = tl.where(is_token, _key(value, token, width), _LOWEST)
    tl.store(keys + n * tl.num_programs(1) + tl.program_id(1), tl.max(key, 0))


@triton.jit
def best_of_row(
    keys: tl.tensor, tokens: tl.tensor, finite: tl.tensor, num_parts: tl.tensor, width: tl.tensor, PARTS: tl.constexpr
) -> None:
    """Grid: rows."""
    n = tl.program_id(0)
    part = tl.arange(0, PARTS)
    key = tl.max(tl.load(keys + n * num_parts + part, mask=part < num_parts, other=_LOWEST), 0)
    tl.store(tokens + n, _token_of(key, width))
    if finite is not None:
        bits = key >> 32
        tl.store(finite + n, (bits < _BITS_OF_INF) & (bits > -_BITS_OF_INF - 1))


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions"])
def make_noise(
    seeds: tl.tensor, positions: tl.tensor, ids: tl.tensor, noise: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """Grid: rows, parts of their candidates."""
    n = tl.program_id(0)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = n.to(tl.int64) * count + k
    token = tl.load(ids + place, mask=k < count, other=0)
    tl.store(noise + place, gumbel(tl.load(seeds + n), tl.load(positions + n), token), mask=k < count)


@triton.jit(do_not_specialize_on_alignment=["at", "temperature"])
def make_keys(
    logits: tl.tensor,
    at: tl.tensor,
    temperature: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    keys: tl.tensor,
    PART: tl.constexpr,
) -> None:
    """Grid: rows, parts. keys: int64 [N, V]."""
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    value = _load(logits, at, temperature, stride, token, token < width)
    place = tl.program_id(0).to(tl.int64) * width + token
    tl.store(keys + place, _key(value, token, width), mask=token < width)


@triton.jit(do_not_specialize_on_alignment=["at", "temperature", "values", "ids"])
def open_keys(
    logits: tl.tensor,
    at: tl.tensor,
    temperature: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Grid: rows, parts of their candidates."""
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = tl.program_id(0).to(tl.int64) * count + k
    token = _token_of(tl.load(keys + place, mask=k < count, other=0), width)
    tl.store(ids + place, token, mask=k < count)
    tl.store(values + place, _load(logits, at, temperature, stride, token, k < count), mask=k < count)


@triton.jit(do_not_specialize_on_alignment=["at", "temperature"])
def sum_of_part(
    logits: tl.tensor,
    at: tl.tensor,
    temperature: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    most: tl.tensor,
    sums: tl.tensor,
    PART: tl.constexpr,
) -> None:
    """Grid: rows, parts. The largest logit of a part, and the sum of all relative to it; a part of -inf has a sum of 0."""
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    value = _load(logits, at, temperature, stride, token, token < width)
    greatest = tl.max(value, 0)
    share = tl.where(value == float("-inf"), 0.0, tl.exp(value - greatest))
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(most + place, greatest)
    tl.store(sums + place, tl.sum(share.to(tl.float64), 0))


@triton.jit
def sum_of_row(most: tl.tensor, sums: tl.tensor, normaliser: tl.tensor, num_parts: tl.tensor, PARTS: tl.constexpr) -> None:
    """Grid: rows."""
    n = tl.program_id(0)
    part = tl.arange(0, PARTS)
    is_part = part < num_parts
    most_P = tl.load(most + n * num_parts + part, mask=is_part, other=float("-inf"))
    sum_P = tl.load(sums + n * num_parts + part, mask=is_part, other=0.0)
    greatest = tl.max(most_P, 0)
    factor_P = tl.where(most_P == float("-inf"), 0.0, tl.exp((most_P - greatest).to(tl.float64)))
    tl.store(normaliser + n, tl.log(tl.sum(sum_P * factor_P, 0)) + greatest.to(tl.float64))


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def count_larger(
    logits: tl.tensor, stride: tl.tensor, width: tl.tensor, tokens: tl.tensor, ranks: tl.tensor, PART: tl.constexpr
) -> None:
    """Grid: rows, parts. Whole numbers may be added in any order."""
    n = tl.program_id(0)
    row = logits + n.to(tl.int64) * stride
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    value = tl.load(row + token, mask=token < width, other=float("-inf"))
    tl.atomic_add(ranks + n, tl.sum((value > tl.load(row + tl.load(tokens + n))).to(tl.int64), 0))

"""Top-k, top-p and min-p over ordered candidates in Triton: the twin of `kernels.sampling.count_kept`, in one launch.

A program takes a row, candidate after candidate; masses are float64 and added in one order whatever the number of candidates.
Knows tensors; knows no requests. Called by the sampler of a GPU.

Shape letters: N rows, K candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch

_CANDIDATES_AT_A_TIME = 512


def count_kept(
    values_NK: Tensor, normaliser_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """As the law: how many of the ordered candidates are kept, int64, and whether the K show it, bool."""
    count_N = torch.empty(len(values_NK), dtype=torch.int64, device=values_NK.device)
    settled_N = torch.empty(len(values_NK), dtype=torch.bool, device=values_NK.device)
    if len(values_NK):
        launch_of(values_NK, normaliser_N, top_k_N, top_p_N, min_p_N, vocab_size, count_N, settled_N).run()
    return count_N, settled_N


def launch_of(
    values_NK: Tensor,
    normaliser_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    vocab_size: int,
    count_N: Tensor,
    settled_N: Tensor,
) -> Launch:
    """The numbers of the rows may be columns of a table."""
    assert values_NK.is_contiguous() and normaliser_N.is_contiguous()
    numbers = (*(top_k_N, top_k_N.stride(0)), *(top_p_N, top_p_N.stride(0)), *(min_p_N, min_p_N.stride(0)))
    counts = (values_NK.shape[1], vocab_size, _CANDIDATES_AT_A_TIME)
    return Launch((len(values_NK),), count_row, (values_NK, normaliser_N, *numbers, count_N, settled_N, *counts))


@triton.jit(do_not_specialize_on_alignment=["normaliser", "top_ks", "top_ps", "min_ps"])
def count_row(
    values: tl.tensor,
    normaliser: tl.tensor,
    top_ks: tl.tensor,
    top_k_stride: tl.tensor,
    top_ps: tl.tensor,
    top_p_stride: tl.tensor,
    min_ps: tl.tensor,
    min_p_stride: tl.tensor,
    counts: tl.tensor,
    settled: tl.tensor,
    num_candidates: tl.tensor,
    vocab_size: tl.tensor,
    AT_A_TIME: tl.constexpr,
) -> None:
    """Grid: rows."""
    n = tl.program_id(0)
    values += n.to(tl.int64) * num_candidates
    top_k, top_p = tl.load(top_ks + n * top_k_stride), tl.load(top_ps + n * top_p_stride)
    min_p, whole = tl.load(min_ps + n * min_p_stride), tl.load(normaliser + n)

    passing = tl.full([], 0, tl.int64)
    least = tl.load(values) + tl.log(min_p.to(tl.float32))  # min_p = 0: -inf
    for start in range(0, num_candidates, AT_A_TIME):
        k = start + tl.arange(0, AT_A_TIME)
        passes = (tl.load(values + k, mask=k < num_candidates, other=float("-inf")) >= least) & (k < num_candidates)
        passing += tl.sum(passes.to(tl.int64), 0)
    limit = tl.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    first = tl.minimum(tl.where(passing == num_candidates, vocab_size, passing), limit)
    is_untouched = (min_p <= 0) & (limit == vocab_size)

    num_kept = tl.minimum(first, num_candidates)
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, num_kept, AT_A_TIME):
        mass += tl.sum(_masses(values, start, num_kept, whole, AT_A_TIME), 0)
    target = top_p * tl.where(is_untouched, 1.0, mass)
    before = tl.full([], 0.0, tl.float64)
    nucleus = tl.full([], 0, tl.int64)
    for start in range(0, num_kept, AT_A_TIME):
        mass_K = _masses(values, start, num_kept, whole, AT_A_TIME)
        is_inside_K = before + tl.cumsum(mass_K, 0) - mass_K < target
        nucleus += tl.sum((is_inside_K & (start + tl.arange(0, AT_A_TIME) < num_kept)).to(tl.int64), 0)
        before += tl.sum(mass_K, 0)

    count = tl.maximum(tl.where(top_p < 1.0, nucleus, first), 1)
    tl.store(counts + n, count)
    tl.store(settled + n, (first <= num_candidates) | (is_untouched & (count < num_candidates)))


@triton.jit
def _masses(values: tl.tensor, start: tl.tensor, num_kept: tl.tensor, whole: tl.tensor, AT_A_TIME: tl.constexpr) -> tl.tensor:
    """Probabilities of candidates from `start` on, float64; 0 beyond those that are kept."""
    k = start + tl.arange(0, AT_A_TIME)
    value_K = tl.load(values + k, mask=k < num_kept, other=float("-inf")).to(tl.float64)
    return tl.where(k < num_kept, tl.exp(value_K - whole), 0.0)

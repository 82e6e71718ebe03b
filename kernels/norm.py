"""RMS normalisation, the law: statistics in float32, casts in the order that the checkpoint's family was trained with.

Knows tensors only. Called by model_runner.layers.

Shape letters: T tokens, E hidden, N query and key heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps), scaled per channel, over the last dimension; any leading shape.

    Llama and its relatives cast back to x's dtype and then multiply by the weight. Gemma (`add_unit_offset`) multiplies by
    1 + weight in float32 and then casts. In bfloat16 the two orders round differently, so each family keeps its own.
    """
    x_f32 = x_TE.float()
    normed = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
    if add_unit_offset:
        return (normed * (1.0 + weight_E.float())).to(x_TE.dtype)
    return weight_E * normed.to(x_TE.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of query heads, which are the first `num_heads` of a token, and of key heads, the others."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    num_heads: int
    eps: float
    add_unit_offset: bool


def norm_heads(x_TND: Tensor, norms: HeadNorms) -> Tensor:
    """`rms_norm` of each head with the weight of its kind."""
    q_THD, k_TGD = x_TND[:, : norms.num_heads], x_TND[:, norms.num_heads :]
    q_THD = rms_norm(q_THD, norms.q_weight_D, norms.eps, norms.add_unit_offset)
    return torch.cat((q_THD, rms_norm(k_TGD, norms.k_weight_D, norms.eps, norms.add_unit_offset)), 1)

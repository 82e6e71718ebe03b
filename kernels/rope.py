"""Rotary position embedding, the law: frequencies of every supported scaling, tables for a step's positions, rotation.

Knows tensors and the keys of a scaling mapping (as `config.json` names them). Called by model_runner.layers.

Shape letters: T tokens, N heads, D head dim, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Scaling = Mapping[str, Any]


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> tuple[Tensor, float]:
    """(inv_freq_F in float32, attention factor: a multiplier of cos and sin).

    For "dynamic" these are the frequencies up to the original length; `dynamic_frequencies` gives the longer ones.
    """
    inv_freq_F = 1.0 / (theta ** (_exponents(head_dim)))
    if scaling is None:
        return inv_freq_F, 1.0
    return ROPE_SCALINGS[scaling["rope_type"]](inv_freq_F, theta, scaling)


def dynamic_frequencies(positions_T: Tensor, head_dim: int, theta: float, scaling: Scaling) -> Tensor:
    """Dynamic NTK scaling -> inv_freq_TF: the base grows with the length once that exceeds the original one.

    The length that counts for a token is its own position + 1. Taking the longest request of a batch, or the whole prompt,
    would make a token's keys depend on its neighbours, on chunking and on the prefix cache. Decoding token by token
    gives the same values as the usual stateful implementation.
    """
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    length_T = (positions_T + 1).clamp(min=original)
    stretch_T = (factor * length_T / original) - (factor - 1)
    base_T = theta * stretch_T ** (head_dim / (head_dim - 2))
    return 1.0 / (base_T[:, None] ** _exponents(head_dim, positions_T.device))


def rotary_tables(positions_T: Tensor, inv_freq: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos_T1D, sin_T1D) for `rotate`, computed in float32 and cast. inv_freq: [F], or [T, F] when it depends on the token.

    The sine's first half is negated, so that rotation needs no sign change of its own.
    """
    angles_TF = positions_T[:, None].float() * inv_freq
    cos_TF, sin_TF = angles_TF.cos() * attention_factor, angles_TF.sin() * attention_factor
    cos_TD, sin_TD = torch.cat((cos_TF, cos_TF), -1), torch.cat((-sin_TF, sin_TF), -1)
    return cos_TD.to(dtype)[:, None], sin_TD.to(dtype)[:, None]


def rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotates the pairs (d, d + D/2) of each head by the token's angles."""
    return x_TND * cos_T1D + x_TND.roll(x_TND.shape[-1] // 2, -1) * sin_T1D


def _exponents(head_dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def _unscaled(inv_freq_F: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    return inv_freq_F, 1.0


def _linear(inv_freq_F: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    return inv_freq_F / scaling["factor"], 1.0


def _llama3(inv_freq_F: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength_F = 2 * math.pi / inv_freq_F
    keep_F = (original / wavelength_F - low) / (high - low)
    blended_F = (1 - keep_F) * inv_freq_F / factor + keep_F * inv_freq_F
    scaled_F = torch.where(wavelength_F > original / low, inv_freq_F / factor, blended_F)
    return torch.where(wavelength_F < original / high, inv_freq_F, scaled_F), 1.0


def _yarn(inv_freq_F: Tensor, theta: float, scaling: Scaling) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): per-frequency blend of interpolation and extrapolation, and a temperature on attention."""
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or scaling["max_position_embeddings"] / original
    num_freqs = inv_freq_F.shape[0]
    head_dim = 2 * num_freqs

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp_F = (torch.arange(num_freqs, dtype=torch.float32) - low) / ((high - low) or 0.001)
    extrapolate_F = 1 - ramp_F.clamp(0, 1)
    interpolated_F = 1.0 / (factor * theta ** _exponents(head_dim))
    scaled_F = interpolated_F * (1 - extrapolate_F) + inv_freq_F * extrapolate_F
    return scaled_F, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: Scaling) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


ROPE_SCALINGS: dict[str, Callable[[Tensor, float, Scaling], tuple[Tensor, float]]] = {
    "default": _unscaled,
    "linear": _linear,
    "dynamic": _unscaled,
    "llama3": _llama3,
    "yarn": _yarn,
}

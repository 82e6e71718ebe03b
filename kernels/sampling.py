"""The mathematics of choosing a token: counter-based noise, and the filters top-k, top-p and min-p.

Laws in plain PyTorch. Noise is a pure function of (seed, position, token id), so a choice depends on nothing else in the
batch. Knows no requests; called by the sampler.

Shape letters: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLICE = 256

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, splitmix64's increment, as a signed integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's is arithmetic on signed integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea, Flood 2014) on int64, with wrap-around: every input bit changes every output bit."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, token_id_RK: Tensor) -> Tensor:
    """Standard Gumbel noise [R, K] in float32, for tokens `token_id_RK` (int64; [1, V] broadcasts) at int64 positions.

    53 bits of the hash make the uniform number, which is never 0 or 1.
    """
    key_R = mix(mix(seed_R + _GOLDEN) + position_R * _GOLDEN)
    bits_RK = _shift_right(mix(key_R[:, None] + token_id_RK * _GOLDEN), 11)
    uniform_RK = (bits_RK.double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform_RK)).float()


def filter_threshold(
    values_RK: Tensor, normaliser_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The least logit that min-p, top-k and top-p keep, and whether it is certain: (threshold_R, settled_R).

    values_RK: the K largest logits after temperature, in descending order; normaliser_R: logsumexp over the whole vocabulary.
    min-p is relative to the most likely token; top-p counts within what min-p and top-k kept. Equal logits are kept or
    dropped together, so that no order among them matters. A row is not settled when what it keeps may reach beyond the K.
    """
    num_candidates = values_RK.shape[1]
    threshold_R = torch.where(min_p_R > 0, values_RK[:, 0] + torch.log(min_p_R), -torch.inf)
    k_R = torch.where(top_k_R > 0, top_k_R, vocab_size)
    kth_R = values_RK.gather(1, (k_R.clamp(max=num_candidates) - 1)[:, None])[:, 0]
    threshold_R = torch.maximum(threshold_R, torch.where(k_R <= num_candidates, kth_R, -torch.inf))
    kept_RK = values_RK >= threshold_R[:, None]
    prob_RK = torch.exp(values_RK - normaliser_R[:, None]) * kept_RK
    is_whole_R = values_RK[:, -1] < threshold_R  # what is kept so far lies within the K
    mass_R = torch.where(is_whole_R | (num_candidates == vocab_size), prob_RK.sum(1), 1.0)
    before_RK = prob_RK.cumsum(1) - prob_RK
    count_R = ((before_RK < (top_p_R * mass_R)[:, None]) & kept_RK).sum(1).clamp(min=1)
    nucleus_R = values_RK.gather(1, count_R[:, None] - 1)[:, 0]
    threshold_R = torch.where(top_p_R < 1.0, torch.maximum(threshold_R, nucleus_R), threshold_R)
    # Without the whole mass, only a row that neither min-p nor a larger top-k narrows has a known one: 1.
    known_R = is_whole_R | ((min_p_R <= 0) & (top_k_R <= 0))
    settled_R = (known_R & (values_RK[:, -1] < threshold_R)) | (num_candidates == vocab_size)
    return threshold_R, settled_R

"""Attention of encoders: every token of a text attends to every other, or to those near it; texts do not see each other.

Texts of equal length are computed together, without padding, so that a text's result does not depend on what is beside it but for
the order of sums. Knows tensors only. Called by model_runner.layers.

Shape letters: T tokens of the step, H heads, G kv heads, D head dim, N texts of one length, L that length.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_texts(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    places: Mapping[int, Tensor],
    reach: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(q . k * scale) v within each text. places: length -> where the tokens of the texts of that length are, [N, L].

    reach: how far away a token may be that is seen, on either side; None: any distance. scale: None for 1 / sqrt(D).
    """
    is_grouped = k_TGD.shape[1] != q_THD.shape[1]
    out_THD = torch.empty_like(q_THD)
    for length, place_NL in places.items():
        mask_LL = None
        if reach is not None and length > reach + 1:
            at_L = torch.arange(length, device=q_THD.device)
            mask_LL = (at_L[:, None] - at_L).abs() <= reach
        q, k, v = (x_TND[place_NL].transpose(1, 2) for x_TND in (q_THD, k_TGD, v_TGD))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_LL, scale=scale, enable_gqa=is_grouped)
        out_THD[place_NL] = out.transpose(1, 2)
    return out_THD

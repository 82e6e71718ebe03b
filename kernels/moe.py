"""Mixture of experts, the law: which experts a token is sent to, and the weighted sum of what their gated MLPs make of it.

Routing is in float32; of equal scores the lowest expert comes first. Each expert's output is rounded to the model's dtype, the
sum over a token's experts is in float32. Knows tensors only; for layers that mix experts.

Shape letters: T tokens, X experts, K experts of a token, E hidden, I intermediate, J = 2 * I.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from halfbyte.kernels.activation import GATED_ACTIVATIONS
from halfbyte.kernels.sampling import ordered_top


@dataclass(frozen=True, slots=True)
class Routing:
    """How a checkpoint's family chooses.

    num_chosen: experts per token. by_sigmoid: scores are sigmoids (DeepSeek-V3), else a softmax over all experts (Mixtral, Qwen).
    renormalises: weights are divided by their sum. scale: multiplies them at last.
    """

    num_chosen: int
    by_sigmoid: bool = False
    renormalises: bool = True
    scale: float = 1.0


def route(logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights_TK float32, experts_TK int64) by falling score. bias (float32): added for the choice, not to the weights."""
    scores_TX = logits_TX.float().sigmoid() if routing.by_sigmoid else logits_TX.float().softmax(-1)
    _, experts_TK = ordered_top(scores_TX if bias_X is None else scores_TX + bias_X, routing.num_chosen)
    weights_TK = scores_TX.gather(1, experts_TK)
    if routing.renormalises:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    return weights_TK * routing.scale, experts_TK


def mix_experts(
    x_TE: Tensor, gate_up_XJE: Tensor, down_XEI: Tensor, weights_TK: Tensor, experts_TK: Tensor, hidden_act: str
) -> Tensor:
    """Sum over k of weights[t, k] * down(act(gate(x)) * up(x)) by expert [t, k] -> [T, E]. hidden_act: see GATED_ACTIVATIONS."""
    made_TKE = x_TE.new_empty(*experts_TK.shape, x_TE.shape[1])
    for expert in experts_TK.unique().tolist():
        token, place = torch.where(experts_TK == expert)
        inner = GATED_ACTIVATIONS[hidden_act](F.linear(x_TE[token], gate_up_XJE[expert]))
        made_TKE[token, place] = F.linear(inner, down_XEI[expert])
    return (made_TKE.float() * weights_TK[:, :, None]).sum(1).to(x_TE.dtype)

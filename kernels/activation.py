"""Gated activations, the law: act(gate) * up, where one matrix multiplication made gate and up side by side.

Knows tensors only. Called by model_runner.layers.

Shape letters: T tokens, I intermediate, J = 2 * I.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up_TJ: Tensor) -> Tensor:
    """silu(gate) * up -> [T, I]."""
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def gelu_tanh_and_mul(gate_up_TJ: Tensor) -> Tensor:
    """gelu(gate), in its tanh approximation, * up -> [T, I]."""
    gate_TI, up_TI = gate_up_TJ.chunk(2, dim=-1)
    return F.gelu(gate_TI, approximate="tanh") * up_TI


GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}

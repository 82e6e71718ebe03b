"""Matrix multiplication with a stored weight, the law for plain floating-point weights.

Knows tensors only. Called by model_runner.layers.

Shape letters: T tokens, E inputs, O outputs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x_TE: Tensor, weight_OE: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias in the dtype of x and weight."""
    return F.linear(x_TE, weight_OE, bias_O)

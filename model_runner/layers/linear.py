"""Linear layers, single or stacked: one matrix for the projections that read the same input.

Knows where its rows come from (names of checkpoint modules), nothing of what they mean. Called by attention and MLP layers.

Shape letters: T tokens, E inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from halfbyte.kernels.linear import linear
from halfbyte.model_runner.layers.weights import StackedWeight, weight


class Linear(StackedWeight):
    """y = x W^T + b. `shards` maps each checkpoint module that is stacked here to its number of outputs, in order."""

    bias: nn.Parameter | None

    def __init__(self, num_inputs: int, shards: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(shards)
        num_outputs = sum(shards.values())
        self.weight = weight(num_outputs, num_inputs)
        self.bias = weight(num_outputs) if bias else None

    def forward(self, x_TE: Tensor) -> Tensor:
        return linear(x_TE, self.weight, self.bias)

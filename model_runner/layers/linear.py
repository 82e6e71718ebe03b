"""Linear layers, single or stacked: one matrix for the projections that read the same input.

Knows where its rows come from (names of checkpoint modules), nothing of what they mean. Called by attention and MLP layers.

Shape letters: T tokens, E inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from halfbyte.kernels.linear import linear
from halfbyte.model_runner.layers.weights import StackedWeight, weight

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.program import Program
    from halfbyte.kernels.cpu.weights import PackedMatrix


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

    @property
    def matrices(self) -> list[PackedMatrix]:
        """The packed pieces in the order of their rows, each with its part of the bias."""
        for start, matrix in self.packed.items():
            if self.bias is not None:
                matrix.bias = self.bias.data[start : start + matrix.num_outputs].float()
        return super().matrices

    def record(self, program: Program, x: int, out: int, *, adds: bool = False) -> None:
        program.linear(x, out, self.matrices, adds=adds)

"""Linear layers, single or stacked: one matrix for the projections that read the same input, and what adapters add to it.

Knows where its rows come from (names of checkpoint modules), nothing of what they mean. Called by attention and MLP layers.

Shape letters: T tokens, E inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from halfbyte.kernels.layers import LayerKernels
from halfbyte.kernels.linear import linear
from halfbyte.kernels.lora import StackedLora
from halfbyte.model_runner.layers.weights import StackedWeight, weight

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.lora import PackedLora
    from halfbyte.kernels.cpu.program import Program
    from halfbyte.kernels.cpu.weights import PackedMatrix


@dataclass(frozen=True, slots=True)
class LinearLora:
    """The adapters at a layer that runs in PyTorch, and the kernels of its device."""

    weights: StackedLora
    kernels: LayerKernels


class Linear(StackedWeight):
    """y = x W^T + b. `shards` maps each checkpoint module that is stacked here to its number of outputs, in order."""

    bias: nn.Parameter | None
    lora: LinearLora | None = None
    packed_lora: PackedLora | None = None

    def __init__(self, num_inputs: int, shards: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(shards)
        num_outputs = sum(shards.values())
        self.weight = weight(num_outputs, num_inputs)
        self.bias = weight(num_outputs) if bias else None

    def forward(self, x_TE: Tensor, seat_T: Tensor | None = None) -> Tensor:
        """seat_T: of `ForwardContext`."""
        y_TO = linear(x_TE, self.weight, self.bias)
        if self.lora is None or seat_T is None:
            return y_TO
        return self.lora.kernels.add_lora(y_TO, x_TE, self.lora.weights, seat_T)

    @property
    def matrices(self) -> list[PackedMatrix]:
        """The packed pieces in the order of their rows, each with its part of the bias."""
        for start, matrix in self.packed.items():
            if self.bias is not None:
                matrix.bias = self.bias.data[start : start + matrix.num_outputs].float()
        return super().matrices

    def record(self, program: Program, x: int, out: int, *, adds: bool = False) -> None:
        program.linear(x, out, self.matrices, adds=adds, lora=self.packed_lora)

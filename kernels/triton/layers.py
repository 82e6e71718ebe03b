"""The kernels of a model's layers in Triton, as `kernels.layers` asks for them. Made there, for devices that compile Triton.

Shape letters: T tokens, E hidden, O outputs, N query and key heads, D head dim, J = 2 * intermediate.
"""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.lora import StackedLora
from halfbyte.kernels.norm import HeadNorms
from halfbyte.kernels.triton import activation, lora, norm, rope


class TritonLayers:
    """Implements `LayerKernels`: one launch each, but for adapters."""

    name = "triton"

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False) -> Tensor:
        return norm.rms_norm(x_TE, weight_E, eps, add_unit_offset)

    def add_rms_norm(
        self, x_TE: Tensor, added_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x_TE, added_TE, weight_E, eps, add_unit_offset)

    def rotate(self, x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, norms: HeadNorms | None = None) -> Tensor:
        return rope.rotate(x_TND, cos_T1D, sin_T1D, norms)

    def gated(self, name: str, gate_up_TJ: Tensor) -> Tensor:
        return activation.gated(name, gate_up_TJ)

    def add_lora(self, y_TO: Tensor, x_TE: Tensor, adapters: StackedLora, seat_T: Tensor) -> Tensor:
        return lora.add_lora(y_TO, x_TE, adapters, seat_T)

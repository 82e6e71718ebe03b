"""What the layers of a model need of a device beside products and attention, and the laws as one implementation of it.

`layer_kernels` is the one place where a device's kernels are chosen; modules of a model get them with their memory. Knows
tensors and devices; knows no model. Called by model_runner.layers.

Shape letters: T tokens, E hidden, N query and key heads, D head dim, I intermediate, J = 2 * I.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels import lora
from halfbyte.kernels.activation import GATED_ACTIVATIONS
from halfbyte.kernels.lora import StackedLora
from halfbyte.kernels.norm import HeadNorms, norm_heads, rms_norm
from halfbyte.kernels.rope import rotate


class LayerKernels(Protocol):
    """Each row's result is that of the row alone. Inputs may be views; results are new tensors."""

    name: str

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False) -> Tensor: ...

    def add_rms_norm(
        self, x_TE: Tensor, added_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(x + added in their dtype, its norm)."""
        ...

    def rotate(self, x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, norms: HeadNorms | None = None) -> Tensor:
        """Heads, normalised first where there are norms, turned by the tables of `kernels.rope.rotary_tables`."""
        ...

    def gated(self, name: str, gate_up_TJ: Tensor) -> Tensor:
        """act(gate) * up -> [T, I]; name: a key of `GATED_ACTIVATIONS`."""
        ...

    def add_lora(self, y_TO: Tensor, x_TE: Tensor, adapters: StackedLora, seat_T: Tensor) -> Tensor:
        """y with what each token's adapter adds to it; y may be changed."""
        ...


class TorchLayers:
    """The laws, on any device."""

    name = "torch"

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False) -> Tensor:
        return rms_norm(x_TE, weight_E, eps, add_unit_offset)

    def add_rms_norm(
        self, x_TE: Tensor, added_TE: Tensor, weight_E: Tensor, eps: float, add_unit_offset: bool = False
    ) -> tuple[Tensor, Tensor]:
        sum_TE = x_TE + added_TE
        return sum_TE, rms_norm(sum_TE, weight_E, eps, add_unit_offset)

    def rotate(self, x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, norms: HeadNorms | None = None) -> Tensor:
        return rotate(x_TND if norms is None else norm_heads(x_TND, norms), cos_T1D, sin_T1D)

    def gated(self, name: str, gate_up_TJ: Tensor) -> Tensor:
        return GATED_ACTIVATIONS[name](gate_up_TJ)

    def add_lora(self, y_TO: Tensor, x_TE: Tensor, adapters: StackedLora, seat_T: Tensor) -> Tensor:
        return lora.add_lora(y_TO, x_TE, adapters, seat_T)


TORCH_LAYERS = TorchLayers()


def layer_kernels(device: torch.device | str) -> LayerKernels:
    """Triton on NVIDIA and AMD, which torch both calls "cuda"; the laws elsewhere. UnsupportedError when triton is missing."""
    if torch.device(device).type != "cuda":
        return TORCH_LAYERS
    if find_spec("triton") is None:
        raise UnsupportedError(
            Refusal("the layers of a model on a GPU run in Triton, which is not installed", "pip install 'halfbyte[gpu]'")
        )
    from halfbyte.kernels.triton.layers import TritonLayers

    return TritonLayers()

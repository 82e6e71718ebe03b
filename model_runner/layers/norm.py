"""RMS normalisation with its weight. Called by decoder layers and, per head, by attention.

Shape letters: T tokens, E channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.model_runner.layers.weights import KernelModule, weight

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.program import Program


class RMSNorm(KernelModule):
    """Normalises the last dimension. unit_offset: the stored weight w means 1 + w (Gemma)."""

    def __init__(self, num_channels: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = weight(num_channels)
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.kernels.rms_norm(x_TE, self.weight, self.eps, self.unit_offset)

    def after_sum(self, x_TE: Tensor, added_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(x + added, its norm)."""
        return self.kernels.add_rms_norm(x_TE, added_TE, self.weight, self.eps, self.unit_offset)

    @property
    def factors(self) -> Tensor:
        """What each channel is multiplied by, float32."""
        return self.weight.float() + 1.0 if self.unit_offset else self.weight.float()

    def record(self, program: Program, x: int, out: int, *, adds: bool = False) -> None:
        program.norm(x, out, self.factors, self.eps, adds=adds)

"""RMS normalisation with its weight. Called by decoder layers and, per head, by attention.

Shape letters: T tokens, E channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from halfbyte.kernels.norm import rms_norm
from halfbyte.model_runner.layers.weights import weight


class RMSNorm(nn.Module):
    """Normalises the last dimension. unit_offset: the stored weight w means 1 + w (Gemma)."""

    def __init__(self, num_channels: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = weight(num_channels)
        self.eps = eps
        self.unit_offset = unit_offset

    def forward(self, x_TE: Tensor) -> Tensor:
        return rms_norm(x_TE, self.weight, self.eps, self.unit_offset)

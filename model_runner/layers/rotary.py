"""One kind of rotary embedding: its frequencies, made at construction, and the tables of a step, made once per step.

Called by the model for each kind that its layers use; the layers only rotate.

Shape letters: T tokens, D head dim, F = D / 2 frequencies.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels.rope import ROPE_SCALINGS, dynamic_frequencies, inverse_frequencies, rotary_tables
from halfbyte.model_runner.decoder_config import RopeConfig

RotaryTables: TypeAlias = tuple[Tensor, Tensor]  # cos_T1D, sin_T1D


class Rotary(nn.Module):
    """Tables for `kernels.rope.rotate`."""

    inv_freq_F: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        super().__init__()
        rope_type = config.scaling["rope_type"] if config.scaling else "default"
        if rope_type not in ROPE_SCALINGS:
            raise UnsupportedError(Refusal(f"RoPE type {rope_type!r} is not one of {', '.join(ROPE_SCALINGS)}", ""))
        if config.partial_rotary_factor != 1.0:
            raise UnsupportedError(Refusal(f"partial_rotary_factor {config.partial_rotary_factor} is not 1.0", ""))
        self.config = config
        self.head_dim = head_dim
        self.is_dynamic = rope_type == "dynamic"
        inv_freq_F, self.attention_factor = inverse_frequencies(head_dim, config.theta, config.scaling)
        self.register_buffer("inv_freq_F", inv_freq_F, persistent=False)

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> RotaryTables:
        return rotary_tables(positions_T, self.frequencies(positions_T), self.attention_factor, dtype)

    def frequencies(self, positions_T: Tensor) -> Tensor:
        """float32 [F], or [T, F] where they depend on the position."""
        if self.is_dynamic and self.config.scaling is not None:
            return dynamic_frequencies(positions_T, self.head_dim, self.config.theta, self.config.scaling)
        return self.inv_freq_F

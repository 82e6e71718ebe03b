"""The gated feed-forward block of a decoder layer. Called by decoder layers.

Shape letters: T tokens, E hidden, I intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from halfbyte.errors import Refusal, UnsupportedError
from halfbyte.kernels.activation import GATED_ACTIVATIONS
from halfbyte.model_runner.decoder_config import DecoderConfig
from halfbyte.model_runner.layers.context import ForwardContext
from halfbyte.model_runner.layers.linear import Linear
from halfbyte.model_runner.layers.weights import KernelModule

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.program import Program


class GatedMLP(KernelModule):
    """down(act(gate(x)) * up(x)); gate and up are one matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.hidden_act not in GATED_ACTIVATIONS:
            known = ", ".join(GATED_ACTIVATIONS)
            raise UnsupportedError(Refusal(f"hidden_act {config.hidden_act!r} is not one of {known}", ""))
        inner = config.intermediate_size
        self.gate_up_proj = Linear(config.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias)
        self.down_proj = Linear(inner, {"down_proj": config.hidden_size}, bias=config.mlp_bias)
        self.hidden_act = config.hidden_act
        self.inner = inner

    def forward(self, x_TE: Tensor, context: ForwardContext) -> Tensor:
        inner_TI = self.kernels.gated(self.hidden_act, self.gate_up_proj(x_TE, context.seat_T))
        out_TE: Tensor = self.down_proj(inner_TI, context.seat_T)
        return out_TE

    def record(self, program: Program, x: int, out: int, *, adds: bool = False) -> None:
        inner = program.buffer("mlp", self.inner)
        gate, up = self.gate_up_proj.matrices
        program.gated(x, inner, gate, up, self.hidden_act, self.gate_up_proj.packed_lora)
        self.down_proj.record(program, inner, out, adds=adds)

"""Gated activations in Triton: the twins of `kernels.activation`, act(gate) * up in one pass.

The activation is computed in float32 and rounded before the product, as PyTorch does. Knows tensors only. Called through
`TritonLayers`.

Shape letters: T tokens, I intermediate, J = 2 * I.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.triton.launch import Launch

_NUMBERS_PER_PROGRAM = 1024


def gated(name: str, gate_up_TJ: Tensor) -> Tensor:
    """act(gate) * up -> [T, I], contiguous. name: a key of `GATED_ACTIVATIONS`."""
    num_tokens, num_both = gate_up_TJ.shape
    out_TI = torch.empty(num_tokens, num_both // 2, dtype=gate_up_TJ.dtype, device=gate_up_TJ.device)
    if out_TI.numel():
        launch_of(name, gate_up_TJ, out_TI).run()
    return out_TI


def launch_of(name: str, gate_up_TJ: Tensor, out_TI: Tensor) -> Launch:
    assert gate_up_TJ.stride(1) == 1, "the numbers of a token lie side by side"
    num_tokens, num_inner = out_TI.shape
    grid = (num_tokens, triton.cdiv(num_inner, _NUMBERS_PER_PROGRAM))
    arguments = (gate_up_TJ, out_TI, gate_up_TJ.stride(0), num_inner, GATED_ACTIVATIONS[name], _NUMBERS_PER_PROGRAM)
    return Launch(grid, gate_rows, arguments)


@triton.jit
def gate_rows(
    gate_up: tl.tensor, out: tl.tensor, stride: tl.tensor, num_inner: tl.tensor, ACTIVATION: tl.constexpr, NUM: tl.constexpr
) -> None:
    """Grid: tokens, parts of NUM numbers."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * NUM + tl.arange(0, NUM)
    is_number = i < num_inner
    gate = tl.load(gate_up + token * stride + i, mask=is_number, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + num_inner + i, mask=is_number, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + token * num_inner + i, (ACTIVATION(gate).to(kind).to(tl.float32) * up).to(kind), mask=is_number)


@triton.jit
def silu(x: tl.tensor) -> tl.tensor:
    return tl.div_rn(x, 1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x: tl.tensor) -> tl.tensor:
    """(1 + tanh(z)) / 2 is the sigmoid of 2 z, which loses nothing where tanh is near -1."""
    twice_z = 1.5957691216057308 * (x + 0.044715 * (x * x * x))  # 2 * sqrt(2 / pi)
    return tl.div_rn(x, 1.0 + tl.exp(-twice_z))


GATED_ACTIVATIONS: dict[str, Any] = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}

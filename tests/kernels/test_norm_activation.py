"""Norms and gated activations against the modules of transformers, bit for bit in every dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from halfbyte.kernels.activation import GATED_ACTIVATIONS
from halfbyte.kernels.linear import linear
from halfbyte.kernels.norm import rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("module", [LlamaRMSNorm, Qwen3RMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("shape", [(5, 576), (7, 3, 80), (1, 128)])
def test_rms_norm_equals_transformers(module: type, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = module(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data = _random(shape[-1], dtype=dtype)
    x = _random(*shape, dtype=dtype, scale=3.0)
    with torch.no_grad():
        expected = norm(x)
        got = rms_norm(x, norm.weight, 1e-5, add_unit_offset=module is Gemma3RMSNorm)
    assert got.dtype == dtype
    assert torch.equal(got, expected)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(GATED_ACTIVATIONS))
def test_gated_activation_equals_transformers(name: str, dtype: torch.dtype) -> None:
    gate, up = _random(6, 96, dtype=dtype, scale=4.0), _random(6, 96, dtype=dtype).flip(0)
    assert torch.equal(GATED_ACTIVATIONS[name](torch.cat((gate, up), -1)), ACT2FN[name](gate) * up)


def test_linear_is_x_times_weight_transposed() -> None:
    x, weight, bias = (_random(*s, dtype=torch.float32) for s in ((4, 8), (3, 8), (3,)))
    expected = torch.stack([(weight * row).sum(-1) for row in x]) + bias
    torch.testing.assert_close(linear(x, weight, bias), expected)

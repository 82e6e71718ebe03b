"""Rotary embedding against transformers: frequencies of every scaling, and the rotation itself, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from halfbyte.kernels.rope import ROPE_SCALINGS, dynamic_frequencies, inverse_frequencies, rotary_tables, rotate

MAX_POSITION = 512
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": MAX_POSITION},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-ratio": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128},
    "yarn-given-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
}


def _hf_config(head_dim: int, theta: float, scaling: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={**scaling, "rope_theta": theta},
    )


def test_every_scaling_has_a_case() -> None:
    assert {s["rope_type"] for s in SCALINGS.values()} == set(ROPE_SCALINGS)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 1e4), (80, 1e4), (128, 5e5), (256, 1e6)])
def test_frequencies_equal_transformers(name: str, head_dim: int, theta: float) -> None:
    config = _hf_config(head_dim, theta, SCALINGS[name])
    rope_type = SCALINGS[name]["rope_type"]
    init = ROPE_INIT_FUNCTIONS.get(rope_type, LlamaRotaryEmbedding.compute_default_rope_parameters)
    expected, expected_factor = init(config, device=torch.device("cpu"))
    scaling = {"max_position_embeddings": MAX_POSITION, **SCALINGS[name]}
    got, got_factor = inverse_frequencies(head_dim, theta, scaling)
    assert torch.equal(got, expected)
    assert got_factor == expected_factor


def test_no_scaling_is_the_default() -> None:
    assert torch.equal(inverse_frequencies(64, 1e4)[0], inverse_frequencies(64, 1e4, SCALINGS["default"])[0])


def test_dynamic_equals_transformers_token_by_token_at_any_batch() -> None:
    """Each token's frequencies are those that transformers uses when it decodes that token alone."""
    rotary = LlamaRotaryEmbedding(_hf_config(64, 1e4, SCALINGS["dynamic"]))
    positions_T = torch.tensor([0, 3, MAX_POSITION - 1, MAX_POSITION, MAX_POSITION + 1, 2 * MAX_POSITION, 3000])
    inv_freq_TF = dynamic_frequencies(positions_T, 64, 1e4, SCALINGS["dynamic"])
    cos_T1D, sin_T1D = rotary_tables(positions_T, inv_freq_TF, 1.0, torch.float32)
    x = torch.zeros(1, dtype=torch.float32)
    for i, position in enumerate(positions_T):
        cos, sin = rotary(x, position[None, None])
        torch.testing.assert_close(cos_T1D[i, 0], cos[0, 0], rtol=0, atol=1e-6 * max(1, int(position)))
        torch.testing.assert_close(sin_T1D[i, 0, 32:], sin[0, 0, 32:], rtol=0, atol=1e-6 * max(1, int(position)))
    alone = torch.cat([dynamic_frequencies(p[None], 64, 1e4, SCALINGS["dynamic"]) for p in positions_T])
    assert torch.equal(inv_freq_TF, alone)
    within_F = inverse_frequencies(64, 1e4, SCALINGS["dynamic"])[0]
    assert torch.equal(inv_freq_TF[:3], within_F.expand(3, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["default", "yarn", "llama3"])
def test_rotation_equals_transformers(name: str, dtype: torch.dtype) -> None:
    rotary = LlamaRotaryEmbedding(_hf_config(80, 1e4, SCALINGS[name]))
    generator = torch.Generator().manual_seed(0)
    q_THD = torch.randn(9, 4, 80, generator=generator).to(dtype)
    k_TGD = torch.randn(9, 2, 80, generator=generator).to(dtype)
    positions_T = torch.tensor([0, 1, 2, 77, 500, 4000, 5, 5, 6])
    cos, sin = rotary(q_THD, positions_T[None])
    expected_q, expected_k = apply_rotary_pos_emb(q_THD.transpose(0, 1)[None], k_TGD.transpose(0, 1)[None], cos, sin)
    inv_freq_F, factor = inverse_frequencies(80, 1e4, SCALINGS[name])
    tables = rotary_tables(positions_T, inv_freq_F, factor, dtype)
    assert torch.equal(rotate(q_THD, *tables), expected_q[0].transpose(0, 1))
    assert torch.equal(rotate(k_TGD, *tables), expected_k[0].transpose(0, 1))

"""Random two-layer checkpoints of each architecture, written by transformers and read by us: the same logits.

The prompts run as one ragged batch, in chunks mixed with decodes, and token by token; each way agrees with transformers, which
sees one whole prompt at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from halfbyte.model_runner.cpu_model import CpuModel
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.source import locate
from tests.numerics.random_models import FAMILIES, FAMILY_DEFAULTS, MAX_POSITION, SHAPES, VOCAB, checkpoint

PROMPT_LENS = {"long": 61, "mid": 24, "short": 5, "one": 1}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What single settings change, on the family that has them.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "dynamic-within": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama3": (
        "LlamaForCausalLM",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 5e5}},
    ),
    "yarn": (
        "Qwen3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e6,
            }
        },
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "qwen2-no-window": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "mistral-no-window": ("MistralForCausalLM", {"sliding_window": None}),
    "gemma3-final-cap": ("Gemma3ForCausalLM", {"final_logit_softcapping": 5.0}),
    "gemma3-scaled-global": (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
}
CASES = [(f, {**FAMILY_DEFAULTS.get(f, {}), **shape}) for f in FAMILIES for shape in SHAPES.values()]
IDS = [f"{f.removesuffix('ForCausalLM')}-{shape}" for f in FAMILIES for shape in SHAPES]
for _name, (_family, _settings) in VARIANTS.items():
    CASES.append((_family, {**FAMILY_DEFAULTS.get(_family, {}), **SHAPES["gqa3"], **_settings}))
    IDS.append(_name)


def _prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(3, VOCAB, (n,), generator=generator).tolist() for name, n in PROMPT_LENS.items()}


@torch.inference_mode()
def _expected(model: Any, prompts: dict[str, list[int]]) -> dict[str, Tensor]:
    return {name: model(torch.tensor([ids]), use_cache=False).logits[0].float() for name, ids in prompts.items()}


def _ours(load: Callable[..., Any], folder: Path, dtype: str = "float32") -> Any:
    files = locate(str(folder))
    return load(files, config_from_files(files, {}), dtype)


def _in_pieces(paged: Any, prompts: dict[str, list[int]], sizes: Callable[[int], int]) -> dict[str, Tensor]:
    """Feeds every prompt in pieces of `sizes(step)` tokens, all prompts in each step as long as they last."""
    done = dict.fromkeys(prompts, 0)
    logits: dict[str, list[Tensor]] = {name: [] for name in prompts}
    step = 0
    while any(done[name] < len(ids) for name, ids in prompts.items()):
        size = sizes(step)
        fed = {name: ids[done[name] : done[name] + size] for name, ids in prompts.items() if done[name] < len(ids)}
        for name, part in paged.step(fed).items():
            logits[name].append(part)
            done[name] += len(part)
        step += 1
    for name in prompts:
        paged.release(name)
    return {name: torch.cat(parts) for name, parts in logits.items()}


def _error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    scale = max(float(x.abs().max()) for x in expected.values())
    assert 1.0 < scale < 1e3, "a comparison of trivial logits shows nothing"
    return max(float((got[name] - x).abs().max()) for name, x in expected.items()) / scale


WAYS: dict[str, Callable[[int], int]] = {
    "whole": lambda step: MAX_POSITION,
    "chunks": lambda step: (7, 1, 16, 3)[step % 4],
    "token by token": lambda step: 1,
}


@pytest.mark.parametrize(("family", "settings"), CASES, ids=IDS)
def test_logits_equal_transformers(
    family: str,
    settings: dict[str, Any],
    tmp_path: Path,
    tolerances: dict[str, float],
    paged_model: Any,
    load: Callable[..., Any],
) -> None:
    expected = _expected(checkpoint(tmp_path, family, settings), _prompts())
    model = _ours(load, tmp_path)
    paged = paged_model(model)
    ways = {way: _in_pieces(paged, _prompts(), sizes) for way, sizes in WAYS.items()}
    for way, got in ways.items():
        assert _error(got, expected) <= tolerances["random_model_fp32"], way
        if isinstance(model, CpuModel):  # the same bits in every batch and cut
            assert all(torch.equal(got[name], ways["whole"][name]) for name in got), way


def test_dynamic_rope_beyond_the_original_length_equals_transformers_decoding(
    tmp_path: Path, tolerances: dict[str, float], paged_model: Any, load: Callable[..., Any]
) -> None:
    """transformers, fed token by token, gives each token the frequencies of its own length; we do so in any cut."""
    scaling = {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4}, "max_position_embeddings": 16}
    reference = checkpoint(tmp_path, "LlamaForCausalLM", {**SHAPES["gqa3"], **scaling})
    prompts = {"long": _prompts()["long"]}
    cache = transformers.DynamicCache(config=reference.config)
    with torch.inference_mode():
        rows = [reference(torch.tensor([[i]]), past_key_values=cache).logits[0].float() for i in prompts["long"]]
    paged = paged_model(_ours(load, tmp_path))
    for way, sizes in WAYS.items():
        assert _error(_in_pieces(paged, prompts, sizes), {"long": torch.cat(rows)}) <= tolerances["random_model_fp32"], way


def _rms_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return float(torch.cat([got[name] - x for name, x in expected.items()]).pow(2).mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_transformers(
    family: str, tmp_path: Path, tolerances: dict[str, float], paged_model: Any, load: Callable[..., Any]
) -> None:
    reference = checkpoint(tmp_path, family, {**FAMILY_DEFAULTS.get(family, {}), **SHAPES["gqa3"]}).bfloat16()
    expected = _expected(reference, _prompts())
    rounded = _expected(reference.float(), _prompts())  # the rounded weights, exact arithmetic
    paged = paged_model(_ours(load, tmp_path, "bfloat16"), kv_format="bfloat16")
    for way, sizes in WAYS.items():
        got = _in_pieces(paged, _prompts(), sizes)
        assert _error(got, expected) <= tolerances["random_model_bf16"], way
        assert _rms_error(got, rounded) <= tolerances["bf16_rounding_of_transformers"] * _rms_error(expected, rounded), way


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_greedy_equals_alone(family: str, tmp_path: Path, paged_model: Any, load: Callable[..., Any]) -> None:
    checkpoint(tmp_path, family, {**FAMILY_DEFAULTS.get(family, {}), **SHAPES["gqa3"]})
    paged = paged_model(_ours(load, tmp_path))
    num_free = len(paged.free)
    together = paged.greedy(_prompts(), 24)
    alone = {name: paged.greedy({name: ids}, 24)[name] for name, ids in _prompts().items()}
    assert together == alone
    assert len(paged.free) == len(set(paged.free)) == num_free

"""KV scales of checkpoints: every spelling lands in its layer, both shapes are read, bad numbers are errors that name them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from halfbyte.errors import ModelFileError
from halfbyte.kvcache.scales import LayerScales
from halfbyte.model_runner.checkpoint import checkpoint_tensors
from halfbyte.model_runner.kv_scales import KVScales, is_kv_scale
from halfbyte.model_runner.source import locate

NUM_HEADS, NUM_KV_HEADS = 6, 2
PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.", "backbone.")
# What follows `layers.N.`, for a side of K and V.
SPELLINGS = (
    "self_attn.{side}_scale",
    "self_attn.attn.{side}_scale",
    "self_attn.{side}_proj.{side}_scale",
    "self_attn.qkv_proj.{side}_scale",
    "self_attn.qkqkv_proj.{side}_scale",
    "self_attn.{side}_proj.output_scale",
    "self_attn.{side}_cache.scale",
    "mixer.{side}_proj.{side}_scale",
)
OTHERS = (
    *("self_attn.q_scale", "self_attn.q_proj.q_scale", "self_attn.q_proj.output_scale", "self_attn.q.scale"),
    *("self_attn.prob_output_scale", "self_attn.prob_scale", "self_attn.kv_scale"),
    *(f"self_attn.{side}_zero_point" for side in "qkv"),
)
STRANGERS = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.k_proj.weight_scale",
    "model.layers.0.self_attn.k_proj.input_scale",
    "model.layers.0.mlp.down_proj.output_scale",
    "model.layers.0.self_attn.k_norm.weight",
    "model.layers.0.self_attn.o_proj.output_scale",
    "model.layers.x.self_attn.k_scale",
    "vision_tower.encoder.layers.0.self_attn.k_scale",
    "layers.0.self_attn.k_scale.extra",
    "k_scale",
)


def collect(**scales: float | list[float] | Tensor) -> KVScales:
    """Scales by layer and name, as in `l0_k_scale=0.5`, in the spelling of llm-compressor."""
    collected = KVScales()
    for key, value in scales.items():
        layer, _, name = key.partition("_")
        collected.add(f"model.layers.{layer[1:]}.self_attn.{name}", torch.as_tensor(value))
    return collected


def read(scales: KVScales, num_layers: int = 1) -> tuple[list[LayerScales], list[str]]:
    return scales.layer_scales(num_layers, NUM_KV_HEADS, NUM_HEADS)


def numbers(scales: LayerScales) -> tuple[list[float], list[float]]:
    for side_G in (scales.k_G, scales.v_G):
        assert side_G.dtype == torch.float32 and side_G.is_contiguous()
    return scales.k_G.tolist(), scales.v_G.tolist()


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_lands_in_its_layer_and_side(prefix: str, spelling: str) -> None:
    scales = KVScales()
    for layer, side, value in ((0, "k", 0.5), (0, "v", 0.25), (12, "k", 2.0), (12, "v", 4.0)):
        name = f"{prefix}layers.{layer}.{spelling.format(side=side)}"
        assert is_kv_scale(name)
        scales.add(name, torch.tensor([value]))
    layers, _ = read(scales, 13)
    assert numbers(layers[0]) == ([0.5] * 2, [0.25] * 2) and numbers(layers[12]) == ([2.0] * 2, [4.0] * 2)
    assert [scales.calibrated for scales in layers] == [True, *[False] * 11, True]


@pytest.mark.parametrize("name", OTHERS)
def test_names_beside_them_are_known(name: str) -> None:
    assert is_kv_scale(f"model.layers.3.{name}")


@pytest.mark.parametrize("name", STRANGERS)
def test_other_names_are_not_taken(name: str) -> None:
    assert not is_kv_scale(name)
    assert list(KVScales().take_from([(name, torch.ones(1))])) == [(name, torch.ones(1))]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_one_number_counts_for_all_heads(shape: tuple[int, ...]) -> None:
    ((scales,), _) = read(collect(l0_k_scale=torch.full(shape, 0.5), l0_v_scale=torch.full(shape, 3.0)))
    assert numbers(scales) == ([0.5, 0.5], [3.0, 3.0])


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1)])
def test_one_number_per_head(shape: tuple[int, ...]) -> None:
    k, v = torch.tensor([0.5, 0.25]).view(shape), torch.tensor([2.0, 3.0]).view(shape)
    ((scales,), lines) = read(collect(l0_k_scale=k, l0_v_scale=v))
    assert numbers(scales) == ([0.5, 0.25], [2.0, 3.0])
    assert lines == ["KV scales: 1 of 1 layers calibrated, K 0.25 to 0.5, V 2 to 3"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_scales_are_float32_whatever_is_stored(dtype: torch.dtype) -> None:
    ((scales,), _) = read(collect(l0_k_scale=torch.tensor([0.75]).to(dtype), l0_v_scale=torch.tensor([1.5]).to(dtype)))
    assert numbers(scales) == ([0.75] * 2, [1.5] * 2)


def test_scales_do_not_share_memory_with_the_file() -> None:
    stored = torch.tensor([0.5])
    collected = collect(l0_k_scale=stored)
    stored.zero_()
    assert numbers(read(collected)[0][0])[0] == [0.5, 0.5]


def test_a_missing_side_takes_that_of_the_other() -> None:
    layers, lines = read(collect(l0_k_scale=0.5, l1_v_scale=[2.0, 3.0]), 2)
    assert numbers(layers[0]) == ([0.5] * 2, [0.5] * 2) and numbers(layers[1]) == ([2.0, 3.0], [2.0, 3.0])
    assert all(scales.calibrated for scales in layers)
    assert "KV scales: layers 0, 1 have one of K or V only, which stands for both" in lines


def test_the_deprecated_scale_is_of_both_sides() -> None:
    layers, lines = read(collect(l0_kv_scale=0.5, l1_kv_scale=0.5, l1_k_scale=2.0), 2)
    assert numbers(layers[0]) == ([0.5] * 2, [0.5] * 2)
    assert numbers(layers[1]) == ([2.0] * 2, [0.5] * 2)
    assert len(lines) == 1


def test_layers_without_scales_have_one_and_are_listed() -> None:
    layers, lines = read(collect(l1_k_scale=0.5, l1_v_scale=0.5), 4)
    assert [numbers(layers[index]) for index in (0, 2, 3)] == [([1.0] * 2, [1.0] * 2)] * 3
    assert [scales.calibrated for scales in layers] == [False, True, False, False]
    assert lines == [
        "KV scales: 1 of 4 layers calibrated, K 0.5 to 0.5, V 0.5 to 0.5; layers 0, 2, 3 have scale 1, which may cost accuracy"
    ]


def test_a_checkpoint_without_scales() -> None:
    scales = KVScales()
    layers, lines = read(scales, 3)
    assert scales.num_layers == 0
    assert [numbers(scales) for scales in layers] == [([1.0] * 2, [1.0] * 2)] * 3 and not any(s.calibrated for s in layers)
    assert lines == ["KV scales: 0 of 3 layers calibrated; all have scale 1, which may cost accuracy"]


def test_scales_without_a_use_are_reported() -> None:
    both = {f"l{layer}_{side}_scale": 0.5 for layer in range(2) for side in "kv"}
    per_head = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 4.0]).view(6, 1, 1)
    scales = collect(**both, l0_q_scale=per_head, l1_q_scale=4.0, l1_prob_output_scale=0.1, l2_k_scale=0.5, l0_k_zero_point=0.0)
    assert scales.num_layers == 3
    layers, lines = read(scales, 2)
    assert all(numbers(layer) == ([0.5] * 2, [0.5] * 2) for layer in layers)
    assert lines[1:] == [
        "KV scales: those of layers 2 are not used, the model has 2 layers",
        "KV scales: those of Q in 2 of 2 layers (3 to 6) are not used, queries are not quantised",
        "KV scales: those of the softmax in 1 of 2 layers are not used, it is not quantised",
    ]


@pytest.mark.parametrize("side", ["k", "v", "kv", "q", "prob"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e39])
def test_values_that_cannot_be_scales(side: str, value: float) -> None:
    scales = collect(**{f"l0_{side}_scale": torch.tensor([value], dtype=torch.float64)})
    with pytest.raises(ModelFileError, match=rf"model\.layers\.0\.self_attn\.{side}_scale holds \S+, expected are positive"):
        read(scales)


def test_the_bad_value_is_shown() -> None:
    for values, shown in (([0.5, 0.0], "0.0"), ([-1.0, 0.5], "-1.0"), ([0.5, float("nan")], "nan")):
        with pytest.raises(ModelFileError, match=f"k_scale holds {shown},"):
            read(collect(l0_k_scale=values))


@pytest.mark.parametrize("shape", [(0,), (3,), (6,), (1, 2, 2), (128,), (2, 2)])
def test_shapes_that_cannot_be_scales(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelFileError) as caught:
        read(collect(l0_k_scale=torch.ones(shape)))
    message = str(caught.value)
    assert f"model.layers.0.self_attn.k_scale has shape {list(shape)}" in message and "[2] or [2, 1, 1]" in message


def test_queries_have_a_number_per_query_head() -> None:
    read(collect(l0_q_scale=torch.ones(6, 1, 1)))
    with pytest.raises(ModelFileError, match=r"q_scale has shape \[2\], .*\[6\]"):
        read(collect(l0_q_scale=torch.ones(2)))


def test_a_scale_under_two_names_has_one_value() -> None:
    scales = collect(l0_k_scale=0.5)
    scales.add("model.layers.0.self_attn.k_proj.k_scale", torch.tensor([0.5]))
    assert numbers(read(scales)[0][0])[0] == [0.5, 0.5]
    with pytest.raises(ModelFileError, match=r"self_attn\.k_scale and model\.layers\.0\.self_attn\.k_cache\.scale .*different"):
        scales.add("model.layers.0.self_attn.k_cache.scale", torch.tensor([0.75]))


def test_the_rest_of_a_checkpoint_streams_by(tmp_path: Path) -> None:
    scales = {f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.5 + layer]) for layer in (0, 1) for side in "kv"}
    weights = {"model.layers.0.self_attn.k_proj.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    save_file(scales | weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    collected = KVScales()
    assert {name for name, _ in collected.take_from(checkpoint_tensors(locate(str(tmp_path))))} == set(weights)
    layers, _ = read(collected, 2)
    assert [numbers(layer) for layer in layers] == [([0.5] * 2, [0.5] * 2), ([1.5] * 2, [1.5] * 2)]

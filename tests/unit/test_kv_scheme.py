"""What checkpoints ask of the KV cache: both tools' ways to say it, and everything that is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.errors import UnsupportedError
from halfbyte.model_runner.kv_scheme import KVScheme, kv_scheme, quantizes_only_kv

# As llm-compressor writes it.
COMPRESSED: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "static_minmax",
    "observer_kwargs": {},
    "scale_dtype": None,
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}
MODELOPT_8_BITS = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT_4_BITS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}


def compressed(**changes: Any) -> dict[str, Any]:
    """A config.json of llm-compressor whose KV scheme has `changes`."""
    scheme = {**COMPRESSED, **changes}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}}


def modelopt(**settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", **settings}}


def found(config: dict[str, Any], hf_quant_config: dict[str, Any] | None = None) -> tuple[str, str]:
    scheme = kv_scheme(config, hf_quant_config)
    assert scheme is not None
    return scheme.kv_format, scheme.strategy


def complaint(config: dict[str, Any], hf_quant_config: dict[str, Any] | None = None) -> str:
    with pytest.raises(UnsupportedError) as caught:
        kv_scheme(config, hf_quant_config)
    (refusal,) = caught.value.refusals
    assert "\n" not in refusal.reason and "--kv-cache-dtype" in refusal.fix
    return refusal.reason


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": None}},
        modelopt(quant_algo="NVFP4", kv_cache_quant_algo=None),
    ],
)
def test_checkpoints_that_ask_for_nothing(config: dict[str, Any]) -> None:
    assert kv_scheme(config) is None
    assert kv_scheme(config, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}) is None


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_llm_compressor(strategy: str) -> None:
    config = compressed(strategy=strategy)
    assert found(config) == ("fp8_e4m3", strategy)
    assert found({"compression_config": config["quantization_config"]}) == ("fp8_e4m3", strategy)


def test_what_a_scheme_leaves_out_is_the_usual() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    assert found({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}) == (
        "fp8_e4m3",
        "tensor",
    )


@pytest.mark.parametrize("key", ["kv_cache_scheme", "kv_cache_quant_algo"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [("FP8", "fp8_e4m3"), ("NVFP4", "nvfp4"), (MODELOPT_8_BITS, "fp8_e4m3"), (MODELOPT_4_BITS, "nvfp4")],
)
def test_modelopt_in_every_place(key: str, value: Any, expected: str) -> None:
    settings = {key: value}
    for config, hf_quant_config in (
        (modelopt(**settings), None),
        (modelopt(quantization=settings), None),
        ({"quantization_config": {"quant_method": "modelopt_fp4", **settings}}, None),
        ({}, {"producer": {"name": "modelopt"}, "quantization": settings}),
        ({}, settings),
        (modelopt(quant_algo="FP8"), {"quantization": settings}),
    ):
        assert found(config, hf_quant_config) == (expected, "tensor")


def test_both_files_may_say_the_same() -> None:
    assert found(modelopt(kv_cache_scheme=MODELOPT_8_BITS), {"quantization": {"kv_cache_quant_algo": "FP8"}})[0] == "fp8_e4m3"


def test_two_schemes_that_differ_are_refused() -> None:
    message = complaint(modelopt(kv_cache_scheme=MODELOPT_8_BITS), {"quantization": {"kv_cache_quant_algo": "NVFP4"}})
    assert "fp8_e4m3" in message and "nvfp4" in message and "hf_quant_config.json" in message


def test_the_source_is_named() -> None:
    assert str(kv_scheme(compressed(strategy="attn_head"))) == (
        "fp8_e4m3, a scale per kv head (config.json: quantization_config.kv_cache_scheme, llm-compressor)"
    )
    assert str(kv_scheme({}, {"quantization": {"kv_cache_quant_algo": "NVFP4"}})) == (
        "nvfp4, a scale per layer (hf_quant_config.json.kv_cache_quant_algo, ModelOpt)"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"symmetric": False}, "asymmetric"),
        ({"dynamic": True}, "dynamic"),
        ({"dynamic": "local"}, "dynamic"),
        ({"num_bits": 4}, "type 'float', num_bits 4"),
        ({"type": "int"}, "type 'int', num_bits 8"),
        ({"type": None}, "type None"),
        ({"num_bits": None}, "num_bits None"),
        ({"strategy": "channel"}, "strategy 'channel'"),
        ({"strategy": "group", "group_size": 128}, "group_size 128"),
        ({"strategy": ["tensor"]}, "strategy ['tensor']"),
    ],
)
def test_schemes_of_llm_compressor_that_are_refused(changes: dict[str, Any], reason: str) -> None:
    message = complaint(compressed(**changes))
    assert reason in message and "quantization_config.kv_cache_scheme" in message


@pytest.mark.parametrize(
    "value",
    [
        *("INT8", "NVFP4_AFFINE", "FP8_K_NVFP4_V", "static", "", 8, ["FP8"]),
        {**MODELOPT_8_BITS, "dynamic": True},
        {**MODELOPT_8_BITS, "type": "int"},
        {**MODELOPT_4_BITS, "group_size": 32},
        {**MODELOPT_8_BITS, "strategy": "token"},
    ],
)
def test_algorithms_of_modelopt_that_are_refused(value: Any) -> None:
    assert "quantization_config.kv_cache_quant_algo" in complaint(modelopt(kv_cache_quant_algo=value))
    message = complaint({}, {"quantization": {"kv_cache_quant_algo": value}})
    assert "hf_quant_config.json" in message
    assert isinstance(value, dict) or repr(value) in message


def test_words_of_others_are_refused_not_dropped() -> None:
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}}
    assert "'static' of quant_method 'fp8'" in complaint(config)
    assert "of quant_method None" in complaint({"quantization_config": {"kv_cache_scheme": COMPRESSED}})
    compressed_word = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": "FP8"}}
    assert "'FP8' is not supported, only an object" in complaint(compressed_word)


@pytest.mark.parametrize(
    ("scheme_format", "asked", "is_refused"),
    [
        ("fp8_e4m3", "fp8_e4m3", False),
        ("fp8_e4m3", "nvfp4", False),
        ("fp8_e4m3", "fp8_e5m2", True),
        ("nvfp4", "nvfp4", False),
        ("nvfp4", "fp8_e4m3", True),
        ("nvfp4", "fp8_e5m2", True),
    ],
)
def test_formats_that_would_misread_the_scales(scheme_format: str, asked: str, is_refused: bool) -> None:
    refusal = KVScheme(scheme_format, "tensor", "config.json").refuse(asked)
    assert (refusal is not None) == is_refused
    if refusal is not None:
        assert asked in refusal.reason and scheme_format in refusal.reason and f"--kv-cache-dtype {scheme_format}" in refusal.fix


WEIGHTS = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}, "input_activations": None}
QUERIES = {"targets": ["LlamaAttention"], "weights": None, "input_activations": COMPRESSED, "output_activations": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"config_groups": {"group_0": QUERIES}}, True),
        ({"sparsity_config": {}, "transform_config": {}}, True),
        ({"config_groups": {"group_0": WEIGHTS}}, False),
        ({"config_groups": {"group_0": QUERIES, "group_1": WEIGHTS}}, False),
        ({"config_groups": {"group_0": {**QUERIES, "targets": ["Linear"]}}}, False),
        ({"config_groups": {"group_0": {**QUERIES, "output_activations": COMPRESSED}}}, False),
        ({"config_groups": {"group_0": None}}, False),
        ({"config_groups": ["W8A8"]}, False),
        ({"sparsity_config": {"format": "sparse-24"}}, False),
        ({"transform_config": {"config_groups": {}}}, False),
        ({"kv_cache_scheme": None}, False),
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, False),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}, False),
    ],
)
def test_whether_weights_are_quantised_too(changes: dict[str, Any], expected: bool) -> None:
    quantization = {**compressed()["quantization_config"], **changes}
    assert quantizes_only_kv(quantization) is expected

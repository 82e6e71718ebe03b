"""Checkpoints and configurations: what transformers wrote is what we read, as safetensors and as the GGUF made from them.

The GGUF files are made here with the names of the `gguf` package and llama.cpp's two changes to weights, so that undoing them
is tested against another description of them than our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from halfbyte.errors import HalfbyteError, ModelFileError, UnsupportedError, UserError
from halfbyte.kernels.rope import inverse_frequencies
from halfbyte.model_runner.checkpoint import checkpoint_tensors
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files
from halfbyte.model_runner.gguf_config import ARCHITECTURES
from halfbyte.model_runner.source import ModelFiles, locate

SIZE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
# case -> (GGUF architecture, configuration class, settings)
CASES: dict[str, tuple[str, type, dict[str, Any]]] = {
    "llama": ("llama", transformers.LlamaConfig, {}),
    "llama-tied": ("llama", transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biases": ("llama", transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", transformers.LlamaConfig, {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "llama-linear": (
        "llama",
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral": ("llama", transformers.MistralConfig, {"sliding_window": 64}),
    "qwen2": ("qwen2", transformers.Qwen2Config, {"head_dim": 16}),
    "qwen3": ("qwen3", transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-yarn": (
        "qwen3",
        transformers.Qwen3Config,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}},
    ),
    "gemma3": ("gemma3", transformers.Gemma3TextConfig, {"sliding_window": 16, "query_pre_attn_scalar": 32}),
}


def random_model(case: str) -> Any:
    """A seeded model of this case, with norms away from their initial values."""
    _, config_class, settings = CASES[case]
    torch.manual_seed(0)
    config = config_class(**{**SIZE, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def stored(model: Any) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors


def rotate_rows(weight: Tensor, num_heads: int) -> Tensor:
    """What llama.cpp's converter does to q and k: halves become neighbours."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        plain, _ = inverse_frequencies(head_dim, rope["rope_theta"])
        scaled, _ = inverse_frequencies(head_dim, rope["rope_theta"], rope)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    if getattr(config, "sliding_window", None) is not None:
        writer.add_sliding_window(config.sliding_window)


def write_gguf(path: Path, model: Any, architecture: str) -> ModelFiles:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, config)
    arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in stored(model).items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = rotate_rows(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = rotate_rows(tensor, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles(str(path), "gguf", path)


def write_folder(folder: Path, model: Any, **options: Any) -> ModelFiles:
    model.save_pretrained(folder, **options)
    return locate(str(folder))


@pytest.mark.parametrize("case", CASES)
def test_gguf_tensors_and_configuration_equal_the_original(case: str, tmp_path: Path) -> None:
    model = random_model(case)
    files = write_gguf(tmp_path / "m.gguf", model, CASES[case][0])
    read = dict(checkpoint_tensors(files))
    expected = stored(model)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        if CASES[case][0] == "gemma3" and name.endswith("norm.weight"):
            tensor = (tensor + 1) - 1
        assert torch.equal(read[name], tensor), name
    ours, theirs = config_from_files(files), config_from_files(write_folder(tmp_path / "hf", model))
    assert comparable(ours) == comparable(theirs)


def comparable(config: DecoderConfig) -> dict[str, Any]:
    """GGUF stores float32 numbers, and knows no keys of `rope_parameters` that its converter did not copy."""
    values = asdict(config)
    values["rms_norm_eps"] = float(np.float32(config.rms_norm_eps))
    for rope in (values["rope"], values["local_rope"] or {}):
        for key in ("theta", "scaling"):
            value = rope.get(key)
            rope[key] = {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
    return values


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("case", ["llama", "llama-tied", "gemma3"])
def test_safetensors_equal_the_original(case: str, shard_size: str, tmp_path: Path) -> None:
    model = random_model(case)
    files = write_folder(tmp_path, model, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    read = {name: tensor.clone() for name, tensor in checkpoint_tensors(files)}
    expected = stored(model)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_nothing_is_yielded_when_a_later_shard_is_broken(tmp_path: Path) -> None:
    files = write_folder(tmp_path, random_model("llama"), max_shard_size="60KB")
    last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ModelFileError, match=f"{last.name} is cut off: expected {len(whole)} bytes, found {len(whole) // 2} bytes"
    ):
        checkpoint_tensors(files)
    last.unlink()
    with pytest.raises(ModelFileError, match=f"{last.name} is missing"):
        checkpoint_tensors(files)


def test_a_cut_gguf_file_is_refused_at_the_call(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", random_model("llama"), "llama")
    whole = files.path.read_bytes()
    files.path.write_bytes(whole[: len(whole) * 99 // 100])
    with pytest.raises(
        ModelFileError, match=rf"cut off: its tensors need \d+ bytes, the file has {len(whole) * 99 // 100} bytes"
    ):
        checkpoint_tensors(files)


def test_quantised_tensors_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(4, dtype=torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="w is stored as F8_E4M3"):
        checkpoint_tensors(locate(str(tmp_path)))


# Configurations of folders


def folder_config(folder: Path, overrides: dict[str, Any] | None = None, **values: Any) -> DecoderConfig:
    folder.mkdir(exist_ok=True)
    base = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **SIZE}
    (folder / "config.json").write_text(json.dumps({**base, **values}))
    return config_from_files(ModelFiles("m", "hf", folder), overrides)


def complaint(call: Callable[[], Any]) -> str:
    with pytest.raises(HalfbyteError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_configuration_of_a_saved_model(case: str, tmp_path: Path) -> None:
    model = random_model(case)
    ours, theirs = config_from_files(write_folder(tmp_path, model)), model.config
    assert ours.architecture == type(model).__name__ and ours.checkpoint_dtype == "float32"
    for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name)
    attention = model.model.layers[0].self_attn
    assert ours.head_dim == attention.head_dim and ours.attention_scale == attention.scaling
    assert ours.attention_bias == (attention.q_proj.bias is not None) and ours.output_bias == (attention.o_proj.bias is not None)
    assert ours.mlp_bias == (model.model.layers[0].mlp.up_proj.bias is not None)
    assert (
        ours.layer_windows == tuple(getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers)
        or case == "mistral"
    )
    assert ours.tie_embeddings == theirs.tie_word_embeddings and ours.eos_token_ids == (2,)
    frequencies, factor = inverse_frequencies(ours.head_dim, ours.rope.theta, ours.rope.scaling)
    rotary = model.model.rotary_emb
    prefix = "full_attention_" if case == "gemma3" else ""
    torch.testing.assert_close(frequencies, getattr(rotary, f"{prefix}inv_freq"))
    assert factor == pytest.approx(getattr(rotary, f"{prefix}attention_scaling"))


def test_the_architecture_selects_what_the_family_fixes(tmp_path: Path) -> None:
    gemma = folder_config(tmp_path, architectures=["Gemma3TextModel"], model_type="gemma3_text", hidden_act=None)
    assert gemma.norm_unit_offset and gemma.qk_norm and gemma.embed_scale == 96**0.5 and gemma.hidden_act == "gelu_pytorch_tanh"
    assert gemma.local_rope is not None and gemma.layer_windows[5:] == (None, 4096)
    mistral = folder_config(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=32)
    assert mistral.layer_windows == (32,) * 7
    assert folder_config(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).layer_windows == (None,) * 7
    qwen = folder_config(
        tmp_path, architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8, max_window_layers=5
    )
    assert qwen.layer_windows == (None,) * 5 + (8, 8) and qwen.attention_bias and not qwen.output_bias
    assert folder_config(tmp_path, architectures=None, model_type="qwen3").architecture == "Qwen3ForCausalLM"


def test_lengths_follow_rotary_scaling(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert folder_config(tmp_path, rope_scaling=yarn).max_position == 2048
    assert folder_config(tmp_path, rope_scaling=yarn, max_position_embeddings=4096).max_position == 4096
    assert folder_config(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}).max_position == 1024
    assert folder_config(tmp_path, rope_scaling={**LLAMA3, "original_max_position_embeddings": 64}).max_position == 512


def test_eos_ids_are_the_union(tmp_path: Path) -> None:
    tmp_path.joinpath("generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert folder_config(tmp_path).eos_token_ids == (2, 5)
    assert folder_config(tmp_path, eos_token_id=None).eos_token_ids == (5, 2)


def test_a_dtype_that_the_configuration_omits_comes_from_the_weights(tmp_path: Path) -> None:
    assert folder_config(tmp_path, torch_dtype=None).checkpoint_dtype == "float32"
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(4, dtype=torch.float16), "b": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert folder_config(tmp_path, torch_dtype=None).checkpoint_dtype == "float16"


def test_overrides(tmp_path: Path) -> None:
    assert folder_config(tmp_path, {"num_hidden_layers": 3}).num_layers == 3
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}
    for written in ({"rope_theta": 7e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}):
        config = folder_config(tmp_path, {"rope_scaling": yarn}, **written)
        assert config.rope.theta == 7e5 and config.rope.scaling is not None and config.rope.scaling["factor"] == 2.0
        assert folder_config(tmp_path, {"rope_theta": 3.0}, **written).rope.theta == 3.0
    assert folder_config(tmp_path, {"rope_parameters": {"rope_theta": 4.0}}, rope_scaling=yarn).rope.theta == 4.0
    with pytest.raises(UserError, match="has no nun_layers"):
        folder_config(tmp_path, {"nun_layers": 3})


def test_overrides_of_a_gguf_file(tmp_path: Path) -> None:
    files = write_gguf(tmp_path / "m.gguf", random_model("llama"), "llama")
    config = config_from_files(files, {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5.0})
    assert config.rope.theta == 5.0 and config.rope.scaling is not None and config.rope.scaling["rope_type"] == "linear"
    with pytest.raises(UserError, match="has no nun_layers"):
        config_from_files(files, {"nun_layers": 3})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "its text-only form, Gemma3ForCausalLM"),
        ({"architectures": ["MambaForCausalLM"]}, "supported are LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        ({"architectures": None, "model_type": None}, "neither an architecture"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rot|longrope"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": 97}, "97"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, "key/value heads"),
        ({"head_dim": 33}, "dimension"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}, "different types"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_configurations_that_cannot_run_are_one_line(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    message = complaint(lambda: folder_config(tmp_path, **values))
    assert any(part in message for part in expected.split("|")), message


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "configuration_evil.EvilConfig"}
    assert folder_config(tmp_path, auto_map=auto_map, trust_remote_code=True).hidden_size == 96


# Configurations of GGUF files


def gguf_file(path: Path, architecture: str = "llama", tensors: dict[str, np.ndarray] | None = None, **values: Any) -> ModelFiles:
    writer = gguf.GGUFWriter(path, architecture)
    base = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for name, value in {**base, **{k.replace("__", "."): v for k, v in values.items()}}.items():
        key = name if name.startswith("tokenizer.") else f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, array in {"token_embd.weight": np.zeros((32, 64), dtype=np.float16), **(tensors or {})}.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("m", "gguf", path)


def test_gguf_defaults(tmp_path: Path) -> None:
    config = config_from_files(gguf_file(tmp_path / "m.gguf"))
    assert (config.num_kv_heads, config.head_dim, config.vocab_size, config.tie_embeddings) == (4, 16, 32, True)
    assert config.checkpoint_dtype == "float16" and config.rope.theta == 10_000.0


def test_gguf_eos_ids_include_the_ends_of_turns(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "x", "<|im_end|>", "<end_of_turn>", "<|eot_id|>"]
    files = gguf_file(
        tmp_path / "m.gguf",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[3, 1, 3, 1, 3],
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=1,
    )
    assert config_from_files(files).eos_token_ids == (2, 1, 0, 4)


def test_gguf_gemma3_constants(tmp_path: Path) -> None:
    small = config_from_files(
        gguf_file(
            tmp_path / "s.gguf",
            "gemma3",
            block_count=12,
            attention__key_length=32,
            attention__value_length=32,
            attention__sliding_window=8,
        )
    )
    assert small.attention_scale == 32**-0.5 and small.layer_windows == ((8,) * 5 + (None,)) * 2
    assert small.local_rope is not None and small.local_rope.theta == 10_000.0
    large = config_from_files(
        gguf_file(
            tmp_path / "l.gguf",
            "gemma3",
            block_count=62,
            attention__key_length=32,
            attention__value_length=32,
            attention__sliding_window=8,
        )
    )
    assert large.attention_scale == 16**-0.5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"architecture": "mamba"}, f"supported are {', '.join(ARCHITECTURES)}"),
        ({"block_count": None}, "llama.block_count"),
        ({"block_count": 0}, "llama.block_count"),
        ({"block_count": 10**6}, "llama.block_count"),
        ({"embedding_length": "wide"}, "llama.embedding_length"),
        ({"attention__head_count": 0}, "llama.attention.head_count"),
        ({"attention__head_count": [4, 2]}, "differs between layers"),
        ({"attention__value_length": 8}, "value_length"),
        ({"rope__dimension_count": 8}, "dimension_count"),
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__scaling__type": "linear"}, "rope.scaling.factor"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, "rope.scaling.factor"),
        ({"attention__layer_norm_rms_epsilon": None}, "rms_epsilon"),
        ({"tensors": {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}}, "no known rule"),
        ({"tensors": {"rope_freqs.weight": np.ones(3, dtype=np.float32)}}, "3 values"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_gguf_configurations_that_cannot_run_are_one_line(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert expected in complaint(lambda: config_from_files(gguf_file(tmp_path / "m.gguf", **values)))

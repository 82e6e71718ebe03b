"""Loading: every parameter is written or named, whatever the checkpoint spells, leaves out or brings along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from halfbyte.errors import ModelFileError, UnsupportedError
from halfbyte.kernels.attention import get_backend
from halfbyte.model_runner.decoder_config import DecoderConfig, RopeConfig, config_from_files
from halfbyte.model_runner.layers.model import Model
from halfbyte.model_runner.layers.weights import LoadReport, materialise, weight_map
from halfbyte.model_runner.loader import load_model
from halfbyte.model_runner.models import MODELS, get_model_class
from halfbyte.model_runner.source import locate


def _config(architecture: str = "LlamaForCausalLM", **changes: Any) -> DecoderConfig:
    settings: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 64,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=1e4),
        "layer_windows": (None, None),
        "attention_bias": architecture.startswith("Qwen2"),
        "qk_norm": architecture.startswith(("Qwen3", "Gemma3")),
        "norm_unit_offset": architecture.startswith("Gemma3"),
        "tie_embeddings": True,
        **changes,
    }
    return DecoderConfig(**settings)


def _build(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Model:
    """A model whose parameters are all NaN."""
    model = get_model_class(config.architecture)(config, get_backend("reference"))
    materialise(model, dtype, "cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def _tensors(model: Model) -> dict[str, Tensor]:
    """Random checkpoint tensors that fit `model`."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(t.rows.shape, generator=generator) for name, t in weight_map(model).items()}


def _is_written(model: Model) -> bool:
    return not any(parameter.isnan().any() for parameter in model.parameters())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Llama checkpoint in one safetensors file, untied."""
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def _load(folder: Path, load_format: str = "auto", dtype: str = "float32") -> tuple[Model, LoadReport]:
    files = locate(str(folder))
    return load_model(files, config_from_files(files, {}), dtype, "cpu", load_format, get_backend("reference"))


def _edit(folder: Path, **changes: Tensor | None) -> None:
    """Rewrites the checkpoint with tensors (dots written as __) added, replaced or, when None, left out."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("architecture", sorted(MODELS))
@pytest.mark.parametrize("tied", [True, False])
def test_the_weight_map_covers_every_parameter_once(architecture: str, tied: bool) -> None:
    model = _build(_config(architecture, tie_embeddings=tied))
    targets = weight_map(model)
    assert sum(t.rows.numel() for t in targets.values()) == sum(p.numel() for p in model.parameters())
    report = model.load_weights(_tensors(model).items())
    assert (report.unused, report.missing, report.mis_shaped) == ([], [], [])
    assert report.num_tensors == len(targets)
    assert report.num_bytes == sum(p.nbytes for p in model.parameters())
    assert _is_written(model)
    assert not any(p.requires_grad for p in model.parameters())
    assert ("lm_head.weight" in targets) != tied


def test_stacked_shards_land_in_order() -> None:
    model = _build(_config())
    tensors = _tensors(model)
    model.load_weights(tensors.items())
    parameters = dict(model.named_parameters())
    for stacked, shards in {
        "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    }.items():
        expected = torch.cat([tensors[f"model.layers.1.{shard}.weight"] for shard in shards])
        assert torch.equal(parameters[f"layers.1.{stacked}.weight"], expected)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "language_model.model.", "model.language_model."])
def test_names_of_bare_and_nested_checkpoints_are_understood(prefix: str) -> None:
    model = _build(_config(tie_embeddings=False))
    tensors = _tensors(model)
    renamed = {prefix + name.removeprefix("model."): t for name, t in tensors.items() if name != "lm_head.weight"}
    report = model.load_weights([*renamed.items(), ("lm_head.weight", tensors["lm_head.weight"])])
    assert not report.unused and _is_written(model)


def test_derived_tables_are_neither_used_nor_reported() -> None:
    model = _build(_config())
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "vision.weight": torch.ones(1)}
    assert model.load_weights((_tensors(model) | extra).items()).unused == ["vision.weight"]


def test_weights_are_cast_to_the_dtype_asked_for(checkpoint: Path) -> None:
    model, _ = _load(checkpoint, dtype="bfloat16")
    exact, _ = _load(checkpoint)
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert torch.equal(parameter, reference.bfloat16()), name


def test_sharded_checkpoints_load_as_whole_ones(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sharded = tmp_path_factory.mktemp("sharded")
    transformers.LlamaForCausalLM.from_pretrained(checkpoint).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, parts = _load(checkpoint)[0], _load(sharded)[0]
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)


def test_tensors_without_a_place_are_reported(checkpoint: Path) -> None:
    _edit(checkpoint, model__layers__7__self_attn__q_proj__weight=torch.ones(4), extra__scale=torch.ones(1))
    _, report = _load(checkpoint)
    assert sorted(report.unused) == ["extra.scale", "model.layers.7.self_attn.q_proj.weight"]


def test_missing_tensors_are_named(checkpoint: Path) -> None:
    _edit(checkpoint, model__layers__1__self_attn__k_proj__weight=None, lm_head__weight=None)
    with pytest.raises(ModelFileError) as caught:
        _load(checkpoint)
    message = str(caught.value)
    assert "2 tensors missing: " in message and "\n" not in message
    assert "model.layers.1.self_attn.k_proj.weight" in message and "lm_head.weight" in message and str(checkpoint) in message


def test_only_the_first_five_names_are_shown(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelFileError, match=r"9 tensors missing: (model\.layers\.2\.[a-z_.]+, ){5}and 4 more"):
        _load(checkpoint)


def test_mis_shaped_tensors_are_named_with_both_shapes(checkpoint: Path) -> None:
    _edit(checkpoint, model__layers__0__self_attn__v_proj__weight=torch.ones(15, 32), model__norm__weight=torch.ones(31))
    with pytest.raises(ModelFileError) as caught:
        _load(checkpoint)
    message = str(caught.value)
    assert "2 tensors of the wrong shape" in message and "missing" not in message
    assert "model.layers.0.self_attn.v_proj.weight (file [15, 32], model [16, 32])" in message
    assert "model.norm.weight (file [31], model [32])" in message


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_dummy_weights_are_seeded_finite_and_read_no_tensor(architecture: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"")
    config = _config(architecture)
    files = locate(str(checkpoint))
    first, report = load_model(files, config, "bfloat16", "cpu", "dummy", get_backend("reference"))
    second, _ = load_model(files, config, "bfloat16", "cpu", "dummy", get_backend("reference"))
    assert _is_written(first)
    assert report.num_bytes == sum(p.nbytes for p in first.parameters())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype == torch.bfloat16 and a.float().std() > 0


def test_parameters_have_no_memory_before_they_are_materialised() -> None:
    model = get_model_class("LlamaForCausalLM")(_config(), get_backend("reference"))
    assert all(p.is_meta for p in model.parameters())


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="architecture MambaForCausalLM is not supported"):
        get_model_class("MambaForCausalLM")
    for changes, message in (
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of silu"),
        ({"rope": RopeConfig(theta=1e4, scaling={"rope_type": "longrope"})}, "RoPE type 'longrope' is not one of default"),
        ({"rope": RopeConfig(theta=1e4, partial_rotary_factor=0.5)}, "partial_rotary_factor 0.5"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            _build(_config(**changes))

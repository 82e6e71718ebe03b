"""`halfbyte preload` from end to end on a CPU: what it makes is what the next start finds; and how starts take measured tiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from halfbyte.config import EngineOptions
from halfbyte.engine.build import resolve_all
from halfbyte.entrypoints import cli
from halfbyte.errors import UserError
from halfbyte.kernels.triton.targets import Cut
from halfbyte.kernels.triton.tiles import Choice, Measured, Table, current_version, keep_table, tiles_path
from halfbyte.model_runner.attention_tiles import layers_by_kind, load_backend
from halfbyte.model_runner.decoder_config import DecoderConfig, config_from_files
from halfbyte.model_runner.runner import load_runner
from halfbyte.model_runner.source import ModelFiles, locate
from halfbyte.platform import platform_named

H100 = replace(platform_named("sm90"), memory_limit_bytes=80 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of two layers, with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("tiny")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(sorted(alphabet))}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({}))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_preload_makes_what_a_start_needs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = Path.home() / ".cache" / "halfbyte" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if kernels.is_dir():  # compiling them takes long, and is tested elsewhere
        (tmp_path / "halfbyte").mkdir()
        (tmp_path / "halfbyte" / "kernels").symlink_to(kernels)
    flags = ["--device", "cpu", "--kv-cache-dtype", "kv4", "--kv-check", "off", "--num-gpu-blocks-override", "64"]
    assert cli.main(["preload", str(folder), *flags]) == 0
    out = capsys.readouterr().out
    [calibration] = (tmp_path / "halfbyte" / "kv_calibration").iterdir()
    assert f"model: {folder}\n" in out
    assert f"KV calibration: {calibration.parent}: 1 files made, 0 were there" in out
    phases = [line.split(" s ")[0].rsplit(maxsplit=1)[0].strip() for line in out.splitlines() if line.startswith("  ")]
    assert phases[0] == "read configuration" and "prepare KV formats" in phases and phases[-1] == "together"

    assert cli.main(["preload", str(folder), *flags]) == 0
    assert f"KV calibration: {calibration.parent}: 0 files made, 1 were there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--autotune", "--device", "cpu"], "--autotune is for GPUs: the CPU kernels are cut by instruction set"),
        (["--device", "cpu", "--kv-cache-dtype", "fp8_ds_mla"], "kv_cache_dtype fp8_ds_mla not supported without MLA"),
        (["--max-model-len", "100000", "--device", "cpu"], "100000"),
    ],
)
def test_errors_are_those_of_a_start(folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["preload", str(folder), *flags]) == 1
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1] and not captured.out


def test_a_model_that_is_not_there_is_said() -> None:
    assert cli.main(["preload", "/nowhere/to/be/found"]) == 1


@pytest.fixture
def config(folder: Path) -> tuple[EngineOptions, ModelFiles, DecoderConfig]:
    options = EngineOptions(model=str(folder), dtype="bfloat16", kv_cache_dtype="fp8_e4m3", attention_backend="triton")
    files = locate(str(folder))
    return options, files, config_from_files(files, {})


def test_a_start_takes_the_file_of_its_gpu(
    config: tuple[EngineOptions, ModelFiles, DecoderConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is not here: all that happens before weights are read."""
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options, files, decoder = config
    resolved = resolve_all(options, files, decoder, H100, {}, streams=True)
    assert load_backend(resolved, decoder, H100, 0)[1] == ["attention tiles: built in"]
    kinds = layers_by_kind(resolved, decoder, 0)
    [kind] = kinds
    assert (kind.heads, kind.head_dim, kind.kv_format, kind.dtype) == (2, 16, "fp8_e4m3", "bfloat16")
    cut = Cut(16, 64, 1, 2)
    choice = Choice(cut, 1e-6, cut, 1e-6)
    table = Table(current_version(), "sm90", "H100", "2026-11-30", (Measured(kind, choice, choice, 1, 1, 1, 1),))
    path = keep_table(table)
    backend, lines = load_backend(resolved, decoder, H100, 0)
    assert backend.name == "triton" and lines == [f"attention tiles: tuned on 2026-11-30 by {path}"]
    path.write_text("{")
    monkeypatch.setattr("halfbyte.model_runner.runner.load_model", None)  # not called
    with pytest.raises(UserError, match=f"the attention tiles of {tiles_path('sm90')} cannot be used"):
        load_runner(resolved, files, decoder, H100)

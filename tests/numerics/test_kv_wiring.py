"""From flags and files to scales, turns and a checked cache: what an engine finds, makes, keeps, refuses and reports."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from halfbyte import LLM, SamplingParams
from halfbyte.config import EngineConfig, EngineOptions
from halfbyte.engine import kv_calibration
from halfbyte.engine.build import absent_backends, build_engine, resolve_all
from halfbyte.engine.front import load_front
from halfbyte.engine.kv_calibration import KVParts, beside_model, check, prepare_parts
from halfbyte.engine.kv_plan import write_plan
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints import cli
from halfbyte.errors import ModelFileError, UnsupportedError, UserError
from halfbyte.kvcache.prefix_hash import extend_hashes
from halfbyte.kvcache.scales import LayerScales
from halfbyte.model_runner.calibration import load_calibration
from halfbyte.model_runner.decoder_config import config_from_files
from halfbyte.model_runner.runner import ModelRunner, load_runner
from halfbyte.model_runner.source import ModelFiles
from halfbyte.platform import detect_platform

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = "The keeper wrote the hour and the wind into his book."
K_SCALES, V_SCALES = (0.25, 0.5), (0.125, 0.0625)  # of the two kv heads
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """In the place of the user's cache folder, as far as calibrations go."""
    monkeypatch.setattr(kv_calibration, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "kv_calibration"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer checkpoint, its first layer with a window, whose tokenizer knows the 256 bytes."""
    path = tmp_path_factory.mktemp("tiny-qwen2")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    bytes_only.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
        use_sliding_window=True,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy, beside which a test may put things."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def add_scales(model: Path, strategy: str) -> None:
    """As llm-compressor leaves a model whose KV cache it calibrated: one scale per layer, or one per kv head."""
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        for side, scales in (("k", K_SCALES), ("v", V_SCALES)):
            scale = torch.tensor(scales).view(2, 1, 1) if strategy == "attn_head" else torch.tensor([scales[0]])
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = scale
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {**SCHEME, "strategy": strategy}}
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))


def options_for(model: Path, **options: Any) -> EngineOptions:
    settings = {"dtype": "float32", "num_threads": 1, "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 2}
    return EngineOptions(model=str(model), **{**settings, **options})


@dataclass
class Loaded:
    """A runner before it has a cache."""

    options: EngineOptions
    config: EngineConfig
    files: ModelFiles
    runner: ModelRunner
    heard: list[str] = field(default_factory=list)

    @property
    def tokenizer(self) -> Tokenizer:
        return load_front(self.options).tokenizer

    def prepare(self) -> KVParts:
        self.heard.clear()
        return prepare_parts(self.config, self.files, self.runner, lambda: self.tokenizer, self.heard.append)


@pytest.fixture
def load_model() -> Iterator[Callable[..., Loaded]]:
    made: list[Loaded] = []

    def make(model: Path, **options: Any) -> Loaded:
        asked = options_for(model, **options)
        files, platform = load_front(asked).files, detect_platform("cpu")
        decoder = config_from_files(files, {})
        config = resolve_all(asked, files, decoder, platform, absent_backends(platform))
        made.append(Loaded(asked, config, files, load_runner(config, files, decoder, platform)))
        return made[-1]

    yield make
    for one in made:
        one.runner.close()


def is_equal(one: KVParts, other: KVParts) -> bool:
    pairs = [pair for layers in zip(one.layers, other.layers, strict=True) for pair in zip(*layers, strict=True)]
    for ours, theirs in pairs:
        names = () if ours is None else type(ours).__slots__
        values = [(getattr(ours, name), getattr(theirs, name)) for name in names]
        if not all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in values):
            return False
    return one.digest == other.digest


def scales_of(parts: KVParts) -> list[tuple[list[float], list[float]]]:
    found = [scales for scales, _ in parts.layers]
    assert all(isinstance(scales, LayerScales) for scales in found)
    return [(scales.k_G.tolist(), scales.v_G.tolist()) for scales in found if scales is not None]


def test_plain_formats_need_nothing(model: Path, cache: Path, load_model: Callable[..., Loaded]) -> None:
    loaded = load_model(model)
    parts = loaded.prepare()
    assert scales_of(parts) == [([1.0] * 2, [1.0] * 2)] * 2 and all(turns is None for _, turns in parts.layers)
    assert (parts.digest, parts.lines, loaded.heard, cache.exists()) == (b"", [], [], False)


def test_a_calibration_is_made_once_and_found_again(model: Path, cache: Path, load_model: Callable[..., Loaded]) -> None:
    loaded = load_model(model, kv_cache_dtype="kv4")
    made = loaded.prepare()
    assert loaded.heard and all(line.startswith("calibrating the KV cache: ") for line in loaded.heard)
    [path] = cache.iterdir()
    fingerprint = path.stem
    [line] = made.lines
    assert line.startswith("KV calibration: ") and line.endswith(f"weights {fingerprint[:12]}")
    assert all(turns is not None for _, turns in made.layers) and len(made.digest) == 32
    found = loaded.prepare()
    assert not loaded.heard and is_equal(found, made) and found.lines == made.lines


def test_the_length_of_a_start_does_not_matter_for_what_is_kept(model: Path, load_model: Callable[..., Loaded]) -> None:
    short = load_model(model, kv_cache_dtype="kv4", max_model_len=40).prepare()
    shutil.rmtree(kv_calibration.cache_folder())
    assert is_equal(load_model(model, kv_cache_dtype="kv4").prepare(), short)


def test_the_file_beside_the_model_comes_first(model: Path, cache: Path, load_model: Callable[..., Loaded]) -> None:
    loaded = load_model(model, kv_cache_dtype="kv4")
    made = loaded.prepare()
    [path] = cache.iterdir()
    stored = load_calibration(path, loaded.runner.model.attention_specs())
    replace(stored, layers=stored.layers[::-1]).save(beside_model(loaded.files))
    beside = loaded.prepare()
    assert not loaded.heard and beside.digest != made.digest
    replace(stored, fingerprint="0" * 64).save(beside_model(loaded.files))
    assert is_equal(loaded.prepare(), made), "that of other weights is passed over"


def test_a_cache_folder_that_cannot_be_written_to(
    model: Path, cache: Path, load_model: Callable[..., Loaded], caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.touch()  # a file where a folder should be
    loaded = load_model(model, kv_cache_dtype="kv4")
    with caplog.at_level(logging.WARNING):
        first = loaded.prepare()
    assert "cannot be kept in" in caplog.text and "made again at the next start" in caplog.text
    assert is_equal(loaded.prepare(), first) and loaded.heard


def test_a_named_file_is_of_these_weights_and_shapes(model: Path, cache: Path, load_model: Callable[..., Loaded]) -> None:
    loaded = load_model(model, kv_cache_dtype="kv4")
    made = loaded.prepare()
    [path] = cache.iterdir()
    named = model.parent / "named.safetensors"
    shutil.move(path, named)
    again = load_model(model, kv_cache_dtype="kv4", kv_calibration=str(named))
    assert is_equal(again.prepare(), made) and not again.heard

    stored = load_calibration(named, loaded.runner.model.attention_specs())
    replace(stored, fingerprint="0" * 64).save(named)
    with pytest.raises(UserError, match=f"--kv-calibration {named} was made for other weights; make one with halfbyte calibrate"):
        again.prepare()
    replace(stored, layers=stored.layers[:1]).save(named)
    with pytest.raises(ModelFileError, match=f"cannot read the KV calibration {named}"):
        again.prepare()


def test_a_named_file_that_nothing_reads_is_not_passed_over_in_silence(
    model: Path, load_model: Callable[..., Loaded], caplog: pytest.LogCaptureFixture
) -> None:
    load_model(model, kv_cache_dtype="bfloat16", kv_calibration="a file").prepare()
    assert "--kv-calibration is not used: bfloat16 KV needs none" in caplog.text
    add_scales(model, "tensor")
    load_model(model, kv_calibration="a file").prepare()
    assert "--kv-calibration is not used: the checkpoint has scales of its own" in caplog.text
    with pytest.raises(ModelFileError, match="cannot read the KV calibration a file"):
        load_model(model, kv_cache_dtype="kv4", kv_calibration="a file").prepare()


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_scales_of_the_checkpoint_win(strategy: str, model: Path, load_model: Callable[..., Loaded]) -> None:
    loaded = load_model(model, kv_cache_dtype="kv4")
    loaded.prepare()
    [path] = kv_calibration.cache_folder().glob("*/*")
    add_scales(model, strategy)
    scaled = load_model(model)
    stored = load_calibration(path, loaded.runner.model.attention_specs())
    replace(stored, fingerprint=kv_calibration.weights_fingerprint(scaled.files)).save(beside_model(scaled.files))
    parts = scaled.prepare()
    expected = (K_SCALES, V_SCALES) if strategy == "attn_head" else ((K_SCALES[0],) * 2, (V_SCALES[0],) * 2)
    assert scales_of(parts) == [tuple(map(list, expected))] * 2
    assert parts.lines[0].startswith("KV scales: 2 of 2 layers calibrated, K 0.25 to") and parts.digest == b""


def test_turned_keys_take_no_scales_of_the_checkpoint(model: Path, load_model: Callable[..., Loaded]) -> None:
    """Those were measured on keys as they are; values are not turned and take theirs."""
    add_scales(model, "attn_head")
    parts = load_model(model, kv_cache_dtype="kv4").prepare()
    assert scales_of(parts) == [([1.0, 1.0], list(V_SCALES))] * 2 and all(turns is not None for _, turns in parts.layers)


def test_fp8_reads_a_calibration_where_the_checkpoint_has_no_scales(
    model: Path, load_model: Callable[..., Loaded], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(model, kv_cache_dtype="fp8")
    with caplog.at_level(logging.WARNING):
        parts = loaded.prepare()
    assert scales_of(parts) == [([1.0] * 2, [1.0] * 2)] * 2 and not loaded.heard
    assert parts.lines == ["KV scales: 0 of 2 layers calibrated; all have scale 1, which may cost accuracy"]
    assert f"run `halfbyte calibrate {model}` once" in caplog.text
    caplog.clear()

    assert cli.main(["calibrate", str(model), "--dtype", "float32", "--num-threads", "1"]) == 0
    with caplog.at_level(logging.WARNING):
        parts = loaded.prepare()
    stored = load_calibration(beside_model(loaded.files), loaded.runner.model.attention_specs())
    assert not caplog.text and parts.digest == stored.digest and all(turns is None for _, turns in parts.layers)
    for (k_G, v_G), layer in zip(scales_of(parts), stored.layers, strict=True):
        assert k_G == pytest.approx((layer.k_most_G / 448).tolist()) and v_G == pytest.approx((layer.v_most_G / 448).tolist())


def test_the_command_reports_what_it_wrote(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", str(model), "--dtype", "float32", "--max-tokens", "300", "--length", "100"]) == 0
    wrote, measured, scales, use = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {model / 'kv_calibration.safetensors'}"
    assert measured == "measured on 252 tokens, 2 layers"
    assert scales.startswith("fp8 scales: K ") and " to " in scales and ", V " in scales
    assert use.startswith(f"use it: halfbyte serve {model} --kv-cache-dtype fp8 (")
    with_output = ["--output", str(model.parent / "out.safetensors")]
    assert cli.main(["calibrate", str(model), "--dtype", "float32", "--max-tokens", "100", "--length", "100", *with_output]) == 0
    assert f"--kv-calibration {model.parent / 'out.safetensors'}" in capsys.readouterr().out


def checkable(load_model: Callable[..., Loaded], model: Path, **options: Any) -> Loaded:
    loaded = load_model(model, kv_cache_dtype="kv4", **options)
    loaded.runner.set_parts(loaded.prepare().layers)
    return loaded


def test_a_format_is_checked_on_other_texts(model: Path, load_model: Callable[..., Loaded]) -> None:
    loaded = checkable(load_model, model)
    line = check(loaded.config, loaded.runner, loaded.tokenizer)
    assert line.startswith("KV check: kv4 against float32, KL 0.0") and line.endswith("(limit 0.1)")


def test_a_format_that_loses_too_much_is_refused(
    model: Path, load_model: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_calibration, "MAX_CHECK_KL", 1e-9)
    loaded = checkable(load_model, model)
    with pytest.raises(UnsupportedError, match="KV check: kv4 .*; use --kv-cache-dtype kv6 or fp8, or start anyway with"):
        check(loaded.config, loaded.runner, loaded.tokenizer)
    warned = checkable(load_model, model, kv_check="warn")
    with caplog.at_level(logging.WARNING):
        line = check(warned.config, warned.runner, warned.tokenizer)
    assert line in caplog.text and "answers will suffer" in caplog.text


def test_keys_that_are_turned_otherwise_than_queries_are_found_out(model: Path, load_model: Callable[..., Loaded]) -> None:
    """The check runs the engine's own attention: it sees more than rounding."""
    loaded = checkable(load_model, model)
    (scales, turns), other = loaded.prepare().layers
    assert turns is not None and turns.q_GDD is not None
    loaded.runner.set_parts([(scales, replace(turns, q_GDD=-turns.q_GDD)), other])
    with pytest.raises(UnsupportedError, match="KV check: kv4 against float32"):
        check(loaded.config, loaded.runner, loaded.tokenizer)


def report_of(llm: LLM) -> str:
    return "\n".join(llm.info.report)


def answer(llm: LLM) -> list[int]:
    try:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids
    finally:
        llm.close()


def make_llm(model: Path, **options: Any) -> LLM:
    asked = options_for(model, **options)
    return LLM(**{name: getattr(asked, name) for name in EngineOptions.__slots__})


def test_an_engine_with_calibrated_keys(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(model, kv_cache_dtype="kv6")
    assert "KV calibration: " in report_of(llm) and "KV check: kv6 against float32" in report_of(llm)
    first = answer(llm)
    monkeypatch.setattr("halfbyte.engine.build.check", lambda *args: pytest.fail("no check was asked for"))
    llm = make_llm(model, kv_cache_dtype="kv6", kv_check="off")
    assert "KV check" not in report_of(llm) and answer(llm) == first


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_auto_is_what_the_checkpoint_was_calibrated_for(strategy: str, model: Path) -> None:
    add_scales(model, strategy)
    llm = make_llm(model)
    assert llm.info.kv_cache_dtype == "fp8_e4m3"
    assert "kv_cache_dtype=fp8_e4m3 (checkpoint)" in report_of(llm)
    assert "KV scales: 2 of 2 layers calibrated, K 0.25 to" in report_of(llm)
    assert answer(llm) == answer(make_llm(model, kv_cache_dtype="fp8_e4m3"))
    llm = make_llm(model, kv_cache_dtype="float32")
    assert "KV scales" not in report_of(llm)
    llm.close()


def test_a_format_that_would_misread_the_scales_is_refused(model: Path) -> None:
    add_scales(model, "tensor")
    with pytest.raises(UnsupportedError, match="the checkpoint's KV scales are for fp8_e4m3 .*, fp8_e5m2 would misread them"):
        make_llm(model, kv_cache_dtype="fp8_e5m2")


def test_cached_prefixes_are_of_one_calibration(model: Path) -> None:
    """Two engines in one process, which have one seed: their first digests differ as soon as their calibrations do."""

    def first_digest() -> tuple[bytes, bytes]:
        core, _ = build_engine(options_for(model, kv_cache_dtype="kv4", kv_check="off"))
        manager = core.scheduler.manager
        hashes: list[bytes] = []
        extend_hashes(hashes, list(range(manager.block_size)), manager.block_size, None, manager.content)
        core.close()
        return hashes[0], manager.content

    made = first_digest()
    assert first_digest() == made and made[1]
    words = ["--dtype", "float32", "--num-threads", "1", "--max-tokens", "500"]
    assert cli.main(["calibrate", str(model), *words]) == 0
    digest, content = first_digest()
    assert digest != made[0] and content != made[1]


@pytest.mark.parametrize(
    ("skip", "lines"),
    [
        (["0"], ["KV format float32: layers 0", "KV format nvfp4: layers 1"]),
        (["sliding_window"], ["KV format float32: layers 0", "KV format nvfp4: layers 1"]),
        (["1"], ["KV format nvfp4: layers 0", "KV format float32: layers 1"]),
    ],
)
def test_skipped_layers_are_reported(skip: list[str], lines: list[str], model: Path) -> None:
    llm = make_llm(model, kv_cache_dtype="nvfp4", kv_cache_dtype_skip_layers=skip)
    assert [line for line in llm.info.report if line.startswith("KV format")] == lines
    assert len(answer(llm)) == 8


def test_a_plan_is_carried_out(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, ["kv6", "fp8_e4m3"], {})
    llm = make_llm(model, kv_cache_plan=str(path))
    lines = [line for line in llm.info.report if line.startswith("KV format")]
    assert lines == ["KV format kv6: layers 0", "KV format fp8_e4m3: layers 1"]
    assert "KV calibration: " in report_of(llm)
    assert len(answer(llm)) == 8


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        (["kv4"], {}, "--kv-cache-plan .*plan.json is for 1 layers, this model has 2"),
        (["kv4", "kv9"], {}, "must be one of auto, bfloat16, .* got 'kv9'"),
        (["kv4", "kv4"], {"kv_cache_dtype": "fp8"}, "says the format of every layer; leave --kv-cache-dtype"),
    ],
)
def test_a_plan_that_cannot_be(layers: list[str], options: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, layers, {})
    with pytest.raises(UserError, match=message):
        make_llm(model, kv_cache_plan=str(path), **options)


def test_a_block_that_holds_none_of_the_first_tokens(model: Path) -> None:
    with pytest.raises(UnsupportedError, match="a block of 1 tokens of kv4.* KV holds none of the first 16 tokens, which stay"):
        make_llm(model, kv_cache_dtype="kv4", block_size=1)
    llm = make_llm(model, kv_cache_dtype="kv4", block_size=1, kv_cache_first_tokens=0, kv_check="off")
    assert len(answer(llm)) == 8

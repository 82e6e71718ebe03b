"""`halfbyte kv-tune` on small random models, from the measurement to an engine that serves the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from halfbyte.config import EngineOptions
from halfbyte.engine import kv_tuning
from halfbyte.engine.build import build_engine
from halfbyte.engine.kv_plan import read_plan, write_plan
from halfbyte.engine.kv_tuning import Bits, Room, tune
from halfbyte.errors import UserError

NUM_LAYERS = 6
SIZES: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
)
CONFIGS: dict[str, Callable[[int], Any]] = {
    "full": lambda vocab_size: transformers.LlamaConfig(vocab_size=vocab_size, **SIZES),
    "sliding": lambda vocab_size: transformers.Gemma3TextConfig(
        vocab_size=vocab_size,
        sliding_window=64,
        layer_types=["sliding_attention"] * 4 + ["full_attention"] * 2,
        query_pre_attn_scalar=16,
        **SIZES,
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    """A random model whose tokenizer knows the 256 bytes. Its weights are large, so that noise in the cache shows."""
    folder = tmp_path_factory.mktemp(request.param)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param](len(alphabet)))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "proj" in name or "embed" in name:
                parameter.mul_(6)
    made.save_pretrained(folder)
    return EngineOptions(model=str(folder), dtype="bfloat16", num_threads=2)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short texts; the calibration of a random model is not for the user's cache folder."""
    monkeypatch.setattr(kv_tuning, "TUNE_WINDOW_TOKENS", 64)
    monkeypatch.setattr(kv_tuning, "MAX_TUNE_TOKENS", 128)
    monkeypatch.setattr(kv_tuning, "JUDGE_WINDOW_TOKENS", 128)
    monkeypatch.setattr(kv_tuning, "MAX_JUDGE_TOKENS", 256)
    monkeypatch.setattr("halfbyte.engine.kv_calibration.cache_folder", lambda: tmp_path)


def test_a_plan_is_served_in_the_bytes_that_were_promised(model: EngineOptions, tmp_path: Path) -> None:
    heard: list[str] = []
    found = tune(model, Bits(Fraction(49, 10)), heard.append)
    titles = [row.title for row in found.rows]
    assert titles[:2] == ["tuned", "uniform kv4"] and len(found.costs) == NUM_LAYERS
    assert found.num_tune_tokens == 128 and found.num_judge_tokens == 256
    assert any(line.startswith("measuring layers: text 2 of 2") for line in heard)
    uniform = found.rows[1]
    assert uniform.bits == 4.5 and set(uniform.layers) == {"kv4"}
    for row in found.rows:
        assert row.bits <= 4.9 and 0 < row.kl <= row.kl_p99
    assert found.best.kl == min(row.kl for row in found.rows)
    tuned = found.rows[0]
    assert tuned.bits > 4.5 and set(tuned.layers) != {"kv4"}

    path = tmp_path / "plan.json"
    write_plan(path, tuned.layers, {})
    assert read_plan(path) == list(tuned.layers)
    core, info = build_engine(replace(model, kv_cache_plan=str(path), kv_check="off", max_model_len=128, max_num_seqs=1))
    runner: Any = core.runner
    try:
        assert runner.config.cache.layer_dtypes == tuned.layers
        assert runner.layout.block_bytes == tuned.block_bytes == info.kv_cache_bytes // info.num_blocks
    finally:
        core.close()


def test_costs_fall_with_bits(model: EngineOptions) -> None:
    """What is measured is positive, and finer formats of the same kind cost less."""
    found = tune(model, Bits(Fraction(6)))
    for layer in found.costs:
        assert layer["k"]["kv4"] > layer["k"]["kv5"] > layer["k"]["kv6"] > layer["k"]["bfloat16"] == 0.0
        assert layer["v"]["kv4"] > layer["v"]["kv6"] > layer["v"]["bfloat16"] == 0.0
    assert {"uniform kv4", "uniform kv6"} <= {row.title for row in found.rows}
    assert len({row.layers for row in found.rows}) == len(found.rows)


def test_a_budget_of_tokens_is_kept(model: EngineOptions, tmp_path: Path) -> None:
    """Of what fits into a memory in kv4, 15 of 16 tokens are asked for: some layers can be wider."""
    small = replace(model, max_model_len=256, kv_cache_memory_bytes=1 << 20, max_num_seqs=64, kv_check="off")
    most = kv_cache_tokens(replace(small, kv_cache_dtype="kv4"))
    found = tune(small, Room(most * 15 // 16, 1 << 20, 256, 512))
    assert found.rows[0].bits > 4.5
    for row in found.rows:
        path = tmp_path / "plan.json"
        write_plan(path, row.layers, {})
        assert most * 15 // 16 <= kv_cache_tokens(replace(small, kv_cache_plan=str(path))) <= most


def kv_cache_tokens(options: EngineOptions) -> int:
    core, info = build_engine(options)
    core.close()
    return info.kv_cache_tokens


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (Fraction(4), r"kv4 in all layers is the least that is possible, and needs --bits 4\.5$"),
        (Fraction(16), "all layers fit in bfloat16: there is nothing to tune"),
    ],
)
def test_budgets_that_leave_no_choice(model: EngineOptions, bits: Fraction, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tune(model, Bits(bits))

"""The calibration recipe with the real llm-compressor: what it writes is read back, and its scales mean what we take them for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from halfbyte.model_runner.checkpoint import checkpoint_tensors
from halfbyte.model_runner.kv_scales import KVScales
from halfbyte.model_runner.kv_scheme import kv_scheme, quantizes_only_kv
from halfbyte.model_runner.source import locate

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "calibrate_kv.py"
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = 2, 4, 2
LENGTH, NUM_SAMPLES = 32, 3
E4M3_MAX = 448.0
# One token per byte: the text has more pieces than are asked for.
TEXT = "".join(f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(20))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers whose tokenizer knows the 256 bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def largest_in_first_layer(model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """max |K| and max |V| per kv head over the pieces that the recipe runs, as transformers puts them into its cache."""
    token_ids = transformers.AutoTokenizer.from_pretrained(model)(TEXT).input_ids
    num_pieces = len(token_ids) // LENGTH
    assert num_pieces > NUM_SAMPLES
    starts = [i * num_pieces // NUM_SAMPLES * LENGTH for i in range(NUM_SAMPLES)]
    batch = torch.tensor([token_ids[start : start + LENGTH] for start in starts])
    with torch.no_grad():
        layer = transformers.LlamaForCausalLM.from_pretrained(model)(batch, use_cache=True).past_key_values.layers[0]
    return layer.keys.abs().amax((0, 2, 3)), layer.values.abs().amax((0, 2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_the_recipe_makes_a_checkpoint_that_is_understood(strategy: str, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(TEXT, encoding="utf-8")
    sizes = ["--num-samples", str(NUM_SAMPLES), "--length", str(LENGTH)]
    command = [sys.executable, RECIPE, tiny_model, out, "--text", text, "--strategy", strategy, *sizes]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    scheme = kv_scheme(config)
    assert scheme is not None and (scheme.kv_format, scheme.strategy) == ("fp8_e4m3", strategy)
    assert quantizes_only_kv(config["quantization_config"])

    collected = KVScales()
    weights = dict(collected.take_from(checkpoint_tensors(locate(str(out)))))
    original = load_file(tiny_model / "model.safetensors")
    assert weights.keys() == original.keys() and all(torch.equal(weights[name], original[name]) for name in original)
    layers, lines = collected.layer_scales(NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS)
    assert lines[0].startswith(f"KV scales: {NUM_LAYERS} of {NUM_LAYERS} layers calibrated") and len(lines) == 1
    for scales in layers:
        for side_G in (scales.k_G, scales.v_G):
            assert torch.isfinite(side_G).all() and (side_G > 0).all()
            assert (side_G[0] == side_G[1]) == (strategy == "tensor")

    for side_G, largest_G in zip((layers[0].k_G, layers[0].v_G), largest_in_first_layer(tiny_model), strict=True):
        expected_G = largest_G if strategy == "attn_head" else largest_G.max().expand(NUM_KV_HEADS)
        torch.testing.assert_close(side_G, expected_G / E4M3_MAX, rtol=1e-5, atol=0.0)


@pytest.mark.slow
def test_a_text_that_is_too_short_is_an_error_in_words(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short", encoding="utf-8")
    command = [sys.executable, str(RECIPE), str(tiny_model), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "has fewer than 2048 tokens" in done.stderr
    assert not (tmp_path / "out").exists()

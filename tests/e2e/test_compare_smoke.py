"""`benchmarks/compare.py` on `specs/smoke.json`, as CI runs it: Halfbyte's tokens are transformers' tokens; no time is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "benchmarks" / "specs" / "smoke.json"
VOCAB_SIZE = 96


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `tiny`: random weights, so large that no two tokens are nearly as likely as each other."""
    models = tmp_path_factory.mktemp("models")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(config).save_pretrained(models / "tiny")
    words = {f"w{token_id}": token_id for token_id in range(VOCAB_SIZE)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")).save(str(models / "tiny" / "tokenizer.json"))
    return models


@pytest.fixture(scope="module")
def result(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("out") / "result.json"
    command = [sys.executable, "benchmarks/compare.py", str(SPEC), "--models", str(models), "--reps", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| transformers |" in done.stdout
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_tokens_are_those_of_transformers(result: dict[str, Any]) -> None:
    assert result["wrong_output"] == []
    assert set(result["agreement"]) == set(json.loads(SPEC.read_text())["cases"])
    assert all(shares == {"transformers": 1.0} for shares in result["agreement"].values())


def test_result_says_what_ran(result: dict[str, Any]) -> None:
    assert result["environment"]["command"][0].endswith("compare.py") and "seed" in result
    assert set(result["engines"]) == {"halfbyte", "transformers"}
    for engine in result["engines"].values():
        assert engine["pss_bytes"] > 0 and engine["load_s"] > 0 and engine["versions"]["torch"]


def test_every_run_is_kept(result: dict[str, Any]) -> None:
    for name, by_engine in result["runs"].items():
        for runs in by_engine.values():
            assert len(runs) == 2
            for run in runs:
                assert 0 < run["first_tokens_s"] <= run["call_s"] and run["decode_s"] >= 0
                assert run["num_decoded_tokens"] > 0 or name.startswith("p")

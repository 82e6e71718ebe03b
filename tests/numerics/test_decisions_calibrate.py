"""`halfbyte decisions calibrate` with a real model: what it reads is what `LLM.decide` answers, before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte import LLM
from halfbyte.entrypoints.commands import decisions
from halfbyte.entrypoints.decisions.answers import softmax

ITEMS = Path(__file__).resolve().parents[2] / "benchmarks/decisions_data/items.jsonl"
MODEL = "smollm2-135m"
OPTIONS = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}


def test_f03_fitted_temperatures_are_what_answers_are_made_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """25 items of one type. The numbers of a command are those of another start with the file that it wrote."""
    lines = ITEMS.read_text(encoding="utf-8").splitlines()[:25]
    file, output, document = tmp_path / "items.jsonl", tmp_path / "t.json", tmp_path / "all.json"
    file.write_text("\n".join(lines), encoding="utf-8")
    flags = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["calibrate", str(file), "--model", MODEL, "--output", str(output), "--json", str(document), *flags]
    assert decisions.run(words) == 0
    assert f"{MODEL} (LlamaForCausalLM), items.jsonl, order given" in capsys.readouterr().out
    found: dict[str, Any] = json.loads(document.read_text())
    temperature = json.loads(output.read_text())["temperatures"]["noul"]
    assert [item["id"] for item in found["items"]] == [json.loads(line)["id"] for line in lines]
    llm = LLM(MODEL, decisions_config={"temperatures": str(output)}, **OPTIONS)  # type: ignore[arg-type]
    try:
        for line, item in list(zip(lines, found["items"], strict=True))[:3]:
            asked = json.loads(line)
            decision = llm.decide(asked["state"], {"q": asked["question"]})
            expected = softmax(item["listing_logprobs"][0], temperature)
            assert decision.temperatures_from == "t.json" and decision.diagnostics["q"].temperature == temperature
            assert decision.repeatable, "so that batch mates change nothing"
            assert decision.answers["q"].probabilities == dict(zip(("yes", "no"), expected, strict=True))
    finally:
        llm.close()

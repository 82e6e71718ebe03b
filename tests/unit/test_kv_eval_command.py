"""`halfbyte kv-eval`, the command: flags to settings, verdicts and picks, tables, the JSON document and the picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.config import EngineOptions
from halfbyte.entrypoints.commands import kv_eval
from halfbyte.entrypoints.flags import UsageError
from halfbyte.entrypoints.kv_eval import evaluate as evaluation
from halfbyte.entrypoints.kv_eval.metrics import Share, TextResult
from halfbyte.entrypoints.kv_eval.report import document, lines
from halfbyte.entrypoints.kv_eval.results import FormatResult, Report
from halfbyte.entrypoints.kv_eval.settings import Settings, Thresholds
from halfbyte.entrypoints.kv_eval.verdict import failures, pick, verdict
from halfbyte.errors import HalfbyteError, UserError


def text(kl: float, p99: float = 0.1) -> TextResult:
    return TextResult(
        num_tokens=100, kl=kl, kl_low=0.9 * kl, kl_high=1.1 * kl, kl_p99=p99, base_perplexity=9.0, perplexity=9.5, top1=0.9
    )


def result(name: str, bits: float, kl: float | None = None, **shares: Share) -> FormatResult:
    found = None if kl is None else text(kl)
    return FormatResult(name=name, bits_per_element=bits, bytes_per_token=64 * bits, text=found, shares=shares)


BASELINE = result("bfloat16", 16.0, None, retrieval=Share(18, 20))
GOOD = result("fp8", 8.0, 0.005, retrieval=Share(17, 20))
DENSE = result("kv4", 4.5, 0.015, retrieval=Share(17, 20))
POOR = result("nvfp4", 4.5, 0.09, retrieval=Share(9, 20))
REFUSED = FormatResult(name="odd", refusal="odd needs head_dim % 16 == 0, got 72")


def report(*formats: FormatResult, thresholds: Thresholds | None = None) -> Report:
    return Report(
        model="some/model",
        dtype="bfloat16",
        max_model_len=1810,
        texts=("prose",),
        settings=Settings(thresholds=thresholds or Thresholds()),
        baseline=BASELINE,
        formats=formats,
    )


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"max_kl": 0.001}, ["KL 0.005 is more than 0.001"]),
        ({"max_p99_kl": 0.05}, ["p99 KL 0.1 is more than 0.05"]),
        ({"max_retrieval_loss": 0.01}, ["retrieval loses 0.050, more than 0.01"]),
        ({"max_kl": 0.005, "max_p99_kl": 0.1}, []),
    ],
)
def test_failures(changes: dict[str, float], missed: list[str]) -> None:
    assert failures(GOOD, BASELINE, replace(Thresholds(), **changes)) == missed


@pytest.mark.parametrize("test", ["format", "gsm8k"])
def test_losses_of_other_tests_count(test: str) -> None:
    base, worse = (FormatResult(name="x", shares={test: Share(right, 20)}) for right in (10, 8))
    assert [f.partition(" ")[0] for f in failures(worse, base, Thresholds())] == [test]
    assert failures(base, worse, Thresholds()) == [], "a gain is no loss"


def test_what_is_no_number_fails() -> None:
    assert len(failures(result("x", 8.0, math.nan, retrieval=Share(18, 20)), BASELINE, Thresholds())) == 1


def test_verdicts_are_one_line() -> None:
    found = report(GOOD, POOR, REFUSED)
    assert [verdict(one, found) for one in found.formats] == [
        "fp8: passes",
        "nvfp4: fails: KL 0.09 is more than 0.02, retrieval loses 0.450, more than 0.1",
        "odd: not possible here: odd needs head_dim % 16 == 0, got 72",
    ]


def test_pick_takes_the_densest_that_passes() -> None:
    assert pick(report(GOOD, POOR, DENSE, REFUSED)) is DENSE
    assert pick(report(POOR, GOOD)) is GOOD
    better = result("kv4b", 4.5, 0.01, retrieval=Share(17, 20))
    assert pick(report(DENSE, better)) is better
    with pytest.raises(HalfbyteError, match="no KV format passes: nvfp4: fails: .*; odd: not possible"):
        pick(report(POOR, REFUSED))


def test_tokens_per_gib() -> None:
    assert GOOD.tokens_per_gib == 2**30 // 512
    assert REFUSED.tokens_per_gib == 0


def test_lines_show_every_format_once_in_the_main_table() -> None:
    shown = list(lines(report(GOOD, POOR, REFUSED)))
    header = next(line for line in shown if line.startswith("KV cache"))
    rows = shown[shown.index(header) + 1 :][:3]
    assert [row.split()[0] for row in rows] == ["bfloat16", "fp8", "nvfp4"]
    assert rows[0].split()[1:3] == ["16.00", f"{2**30 // 1024:,}"] and " 9.000 " in rows[0]
    assert "0.850 (0.64 - 0.95, n=20)" in rows[1]
    assert shown[-1].startswith("odd: not possible here")


def test_lines_show_parts_where_there_are_several() -> None:
    parts = replace(GOOD, text_by_length={384: text(0.004), 1400: text(0.006)})
    shown = "\n".join(lines(report(parts)))
    assert "text 384   KL 0.004" in shown and "text 1400  KL 0.006" in shown


def test_document_is_json_and_says_what_passes() -> None:
    made = report(GOOD, result("x", 8.0, math.inf, retrieval=Share(18, 20)), REFUSED)
    found = json.loads(json.dumps(document(made), allow_nan=False))
    assert [one["passes"] for one in found["formats"]] == [True, False, False]
    assert found["formats"][1]["text"]["kl"] is None
    assert found["formats"][0]["shares"]["retrieval"]["rate"] == 0.85
    assert found["settings"]["thresholds"]["max_kl"] == 0.02
    assert found["baseline"]["bits_per_element"] == 16.0


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineOptions, Sequence[str], Settings]]:
    """The command without an engine: what `evaluate` was called with; it finds two formats, one of which passes."""
    calls: list[tuple[EngineOptions, Sequence[str], Settings]] = []

    def fake(options: EngineOptions, formats: Sequence[str], settings: Settings, tell: Any) -> Report:
        calls.append((options, formats, settings))
        tell("measuring")
        return replace(report(POOR, GOOD), settings=settings)

    monkeypatch.setattr(evaluation, "evaluate", fake)
    return calls


def test_flags_become_options_formats_and_settings(evaluated: list[Any], tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    words = "some/model --dtype float32 --kv-cache-dtype float32 bfloat16 float32 --baseline float16 --length 100 200 --seed 7"
    words += f" --tests text format --gsm8k {problems} --max-kl 0.5 --step-tokens 1 --text a.txt --num-threads 2"
    assert kv_eval.run(words.split()) == 0
    [(options, formats, settings)] = evaluated
    assert (options.model, options.dtype, options.num_threads, options.kv_cache_dtype) == ("some/model", "float32", 2, "auto")
    assert formats == ["float32", "bfloat16"]
    assert settings == Settings(
        tests=("text", "format", "gsm8k"),
        baseline="float16",
        lengths=(100, 200),
        text_files=(Path("a.txt"),),
        step_tokens=1,
        gsm8k_file=problems,
        seed=7,
        thresholds=Thresholds(max_kl=0.5),
    )


def test_without_names_all_formats_but_the_baseline_are_measured(evaluated: list[Any]) -> None:
    assert kv_eval.run(["--baseline", "float32"]) == 0
    _, formats, settings = evaluated[0]
    assert "float32" not in formats and {"bfloat16", "float16"} <= set(formats)
    assert settings == Settings(baseline="float32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tests speed", "'speed' is not one of text"),
        ("--tests gsm8k", "give it with --gsm8k FILE"),
        ("--kv-cache-dtype bfloat16 nothing", "'nothing'"),
        ("--baseline nothing", "'nothing'"),
        ("--length 2", "at least 3"),
        ("--retrieval-lengths many", "at least 100, got many"),
        ("--max-retrieval-loss 2", "in \\[0, 1\\]"),
        ("--output /nowhere/x.json", "a folder that exists"),
        ("--plot x.nothing", "--plot: x.nothing must end in"),
        ("--plot x.png --tests retrieval", "--plot is for the text test"),
        ("--text a.txt --tests retrieval", "--text is for the text test"),
        ("--retrieval-queries 3 --tests text", "--retrieval-queries is for the retrieval test"),
        ("--max-format-loss 0.1", "--max-format-loss is for the format test"),
        ("--gsm8k-shots 0", "--gsm8k-shots is for the gsm8k test"),
    ],
)
def test_wrong_flags_are_said_at_once(evaluated: list[Any], words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kv_eval.run(words.split())
    assert evaluated == []


def test_tables_on_standard_output_and_files(
    evaluated: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_eval, "environment", lambda: {"commit": "abc"})
    output, plot = tmp_path / "found.json", tmp_path / "found.svg"
    assert kv_eval.run(["--output", str(output), "--plot", str(plot)]) == 0
    shown = capsys.readouterr()
    assert "fp8: passes" in shown.out and "measuring" in shown.err and "measuring" not in shown.out
    found = json.loads(output.read_text())
    assert found["environment"] == {"commit": "abc"} and [one["name"] for one in found["formats"]] == ["nvfp4", "fp8"]
    assert "<svg" in plot.read_text()


def test_pick_prints_one_name(evaluated: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_eval.run(["--pick"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "fp8\n" and "nvfp4: fails" in shown.err
    with pytest.raises(HalfbyteError, match="no KV format passes"):
        kv_eval.run(["--pick", "--max-kl", "0.0001"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({}, {"tests": ()}, "nothing to measure"),
        ({}, {"tests": ("retrieval",), "num_retrieval_queries": 0}, "nothing to measure"),
        ({}, {"step_tokens": 513}, "--step-tokens 513"),
        ({"max_num_batched_tokens": 64}, {"step_tokens": 65}, "--step-tokens 65"),
        ({}, {"tests": ("gsm8k",)}, "--gsm8k FILE"),
    ],
)
def test_plans_that_cannot_be(options: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        evaluation.make_plan(EngineOptions(**options), Settings(**settings))


def test_the_engine_is_as_long_as_the_plan_needs() -> None:
    settings = Settings(lengths=(384, 900), retrieval_lengths=(200,), num_retrieval_queries=3)
    plan = evaluation.make_plan(EngineOptions(), settings)
    assert plan.options.max_model_len == 900 == max(len(window.token_ids) for window in plan.windows)
    assert {window.length for window in plan.windows} == {384, 900}
    short = evaluation.make_plan(EngineOptions(max_model_len=300), settings)
    assert {len(window.token_ids) for window in short.windows} == {300} and short.options.max_model_len == 300

"""`halfbyte bench throughput`: exact speeds from an engine that keeps its own clock, and what becomes of each flag."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte import LLM, SamplingParams
from halfbyte.entrypoints import cli
from halfbyte.entrypoints.bench.datasets import BenchRequest
from halfbyte.entrypoints.bench.throughput import measure, report
from halfbyte.errors import HalfbyteError

FakeEngine = Any
pytestmark = pytest.mark.usefixtures("bench_command")


def requests_of(*lengths: tuple[int, int]) -> list[BenchRequest]:
    return [BenchRequest([200 + i] * asked, "", asked, said) for i, (asked, said) in enumerate(lengths)]


def test_speeds_are_exact(fake_engine: FakeEngine) -> None:
    """All enter in a step of 2 s; the longest answer then takes 4 steps of 0.5 s."""
    requests = requests_of((10, 5), (20, 3), (2, 4))
    result = measure(LLM(), requests, SamplingParams(ignore_eos=True), fake_engine.clock)
    assert result == {
        "elapsed_time": 4.0,
        "num_requests": 3,
        "total_num_tokens": 44,
        "requests_per_second": 0.75,
        "tokens_per_second": 11.0,
        "output_tokens_per_second": 3.0,
        "num_prompt_tokens": 32,
        "num_output_tokens": 12,
        "num_cached_tokens": 3,
        "num_preemptions": 0,
    }
    lines = list(report(result | {"prefix_share": 0.25}))
    assert lines[0] == "Throughput: 0.75 requests/s, 11.00 total tokens/s, 3.00 output tokens/s"
    assert lines[3] == "Prefix share: 25.0% of the prompt tokens stand in a common prefix; 3 were answered from the cache"


def test_each_sequence_counts(fake_engine: FakeEngine) -> None:
    result = measure(LLM(), requests_of((10, 5)), SamplingParams(ignore_eos=True, n=4), fake_engine.clock)
    assert (result["num_requests"], result["num_prompt_tokens"], result["num_output_tokens"]) == (1, 10, 20)


def test_texts_are_encoded_within_the_measurement(fake_engine: FakeEngine) -> None:
    measure(LLM(), [BenchRequest(None, "aa bb", 2, 1)], SamplingParams(ignore_eos=True), fake_engine.clock)
    [[request]] = fake_engine.batches
    assert len(request.prompt_token_ids) == 2


def test_a_short_answer_is_an_error(fake_engine: FakeEngine) -> None:
    fake_engine.short_by = 2
    with pytest.raises(HalfbyteError, match="a request ended after 3 of 5 tokens"):
        measure(LLM(), requests_of((10, 5)), SamplingParams(ignore_eos=True), fake_engine.clock)


def test_command(fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["bench", "throughput", "--model", "m", "--num-prompts", "4", "--num-warmups", "2", "--seed", "3", "--n", "2"]
    words += ["--input-len", "6", "--random-output-len", "5", "--prefix-len", "8", "--output-json", str(path)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("Throughput: ")
    warmups, measured = fake_engine.batches
    assert (len(warmups), len(measured)) == (2 * 2, 4 * 2)
    prompts = {tuple(request.prompt_token_ids) for request in (*warmups, *measured)}
    assert len(prompts) == 6 and {len(prompt) for prompt in prompts} == {14} and len({prompt[:8] for prompt in prompts}) == 1
    document = json.loads(path.read_text())
    assert (document["num_requests"], document["num_prompt_tokens"], document["num_output_tokens"]) == (4, 56, 40)
    assert (document["seed"], document["num_warmups"], document["n"], document["dataset_name"]) == (3, 2, 2, "random")
    assert document["prefix_share"] >= 40 / 84 and document["environment"]["machine"] == {"cpu": "a cpu"}
    assert fake_engine.closed


def test_seed_is_fresh_and_recorded(fake_engine: FakeEngine, tmp_path: Path) -> None:
    seeds, prompts = set(), set()
    for number in range(2):
        path = tmp_path / f"{number}.json"
        words = ["bench", "throughput", "--num-prompts", "1", "--input-len", "9", "--output-json", str(path)]
        assert cli.main(words) == 0
        seeds.add(json.loads(path.read_text())["seed"])
        prompts.add(tuple(fake_engine.batches[-1][0].prompt_token_ids))
    assert len(seeds) == len(prompts) == 2


def test_output_len_of_a_file(fake_engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "aa bb"}\n')
    words = ["bench", "throughput", "--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "1"]
    assert cli.main([*words, "--output-len", "7"]) == 0
    assert fake_engine.batches[0][0].sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--backend", "hf"],
            "--backend is not supported yet: this measures Halfbyte; `halfbyte bench serve` measures any server",
        ),
        (["--async-engine"], "--async-engine is not supported yet: use `halfbyte bench serve`"),
        (["--lora-path", "x"], "--lora-path is not supported yet: adapters cannot be loaded; merge them into the weights"),
        (["--hf-split", "x"], "--hf-split is not supported yet: datasets of the hub are not read; use --dataset-name custom"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--dataset-name", "sharegpt", "--input-len", "3"], "--input-len is not for --dataset-name sharegpt"),
        (["--input-len", "3", "--random-input-len", "4"], "--input-len and --random-input-len mean the same: give one of them"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is not supported yet: this version runs on one device"),
    ],
)
def test_wrong_flags(words: list[str], message: str, fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "throughput", *words]) == 2
    assert capsys.readouterr().err == f"halfbyte: error: {message}\n"
    assert not fake_engine.options


def test_flags_of_another_dataset(fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "throughput", "--custom-output-len", "3"]) == 2
    assert "--custom-output-len is not for --dataset-name random" in capsys.readouterr().err
    assert not fake_engine.options, "said before the model loads"

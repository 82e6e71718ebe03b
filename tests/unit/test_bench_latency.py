"""`halfbyte bench latency`: exact times from an engine that keeps its own clock, the order of runs, and the file it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import halfbyte
from halfbyte.config import EngineOptions
from halfbyte.entrypoints import cli
from halfbyte.entrypoints.bench import latency
from halfbyte.entrypoints.bench.latency import Plan, Run, TimedClient, describe, measure, report
from halfbyte.errors import HalfbyteError
from halfbyte.types import SamplingParams

FakeEngine = Any
pytestmark = pytest.mark.usefixtures("bench_command")


def run_plan(engine: FakeEngine, plan: Plan, seed: int = 0, **sampling: Any) -> dict[int, list[Run]]:
    llm, client = latency._start(EngineOptions())
    client.clock = engine.clock
    params = SamplingParams(max_tokens=plan.output_len, ignore_eos=True, **sampling)
    return measure(llm, client, plan, params, seed)


def test_prefill_and_decode_are_parts_of_the_run(fake_engine: FakeEngine) -> None:
    plan = Plan(batch_sizes=(2,), input_len=6, output_len=5, num_iters=3, num_iters_warmup=1)
    runs = run_plan(fake_engine, plan)
    assert runs == {2: [Run(latency_s=4.0, prefill_s=2.0, decode_s=2.0, num_decode_tokens=8)] * 3}
    result = describe(2, plan, 1, runs[2])
    assert (result["avg_latency"], result["latencies"]) == (4.0, [4.0, 4.0, 4.0])
    assert result["output_tokens_per_s"] == {"median": 2.5, "min": 2.5, "max": 2.5}  # 10 tokens in 4 s
    assert result["prefill_tokens_per_s"]["median"] == 6.0  # 12 tokens in 2 s
    assert result["decode_tokens_per_s"]["median"] == 4.0  # 8 tokens in 2 s


def test_prefill_ends_with_the_last_first_token(fake_engine: FakeEngine) -> None:
    """Two requests enter one after the other: the token that the first one got meanwhile counts for neither part."""
    fake_engine.num_entering = 1
    plan = Plan(batch_sizes=(2,), input_len=6, output_len=3, num_iters=1, num_iters_warmup=0)
    assert run_plan(fake_engine, plan) == {2: [Run(latency_s=5.0, prefill_s=4.0, decode_s=1.0, num_decode_tokens=3)]}


def test_one_output_token_has_no_decode(fake_engine: FakeEngine) -> None:
    plan = Plan(batch_sizes=(1,), input_len=6, output_len=1, num_iters=1, num_iters_warmup=0)
    runs = run_plan(fake_engine, plan)
    assert runs == {1: [Run(latency_s=2.0, prefill_s=2.0, decode_s=0.0, num_decode_tokens=0)]}
    result = describe(1, plan, 1, runs[1])
    assert "decode_tokens_per_s" not in result and not any("Decode" in line for line in report(result))


def test_sequences_count(fake_engine: FakeEngine) -> None:
    plan = Plan(batch_sizes=(2,), input_len=6, output_len=5, num_iters=1, num_iters_warmup=0)
    runs = run_plan(fake_engine, plan, n=3)
    assert runs[2][0].num_decode_tokens == 2 * 3 * 4
    assert describe(2, plan, 3, runs[2])["output_tokens_per_s"]["median"] == 30 / 4.0


def test_percentiles_lie_between_neighbours() -> None:
    runs = [Run(latency_s=float(s), prefill_s=1.0, decode_s=1.0, num_decode_tokens=1) for s in range(1, 12)]
    result = describe(1, Plan(), 1, runs)
    assert result["percentiles"] == {"10": 2.0, "25": 3.5, "50": 6.0, "75": 8.5, "90": 10.0, "99": 10.9}
    assert "  99% percentile latency: 10.9000 seconds" in list(report(result))


def test_sizes_take_turns_and_no_prompt_comes_twice(fake_engine: FakeEngine) -> None:
    plan = Plan(batch_sizes=(1, 4), input_len=6, output_len=2, num_iters=2, num_iters_warmup=1)
    runs = run_plan(fake_engine, plan)
    assert [len(batch) for batch in fake_engine.batches] == [1, 4] * 3
    assert {size: len(of_size) for size, of_size in runs.items()} == {1: 2, 4: 2}
    prompts = [tuple(request.prompt_token_ids) for batch in fake_engine.batches for request in batch]
    assert {len(prompt) for prompt in prompts} == {6} and len(set(prompts)) == len(prompts) == 15


def test_a_short_answer_is_an_error(fake_engine: FakeEngine) -> None:
    fake_engine.short_by = 1
    with pytest.raises(HalfbyteError, match="a request ended after 9 of 10 tokens \\(length\\)"):
        run_plan(fake_engine, Plan(batch_sizes=(1,), output_len=10))


def test_timed_client_passes_everything_on() -> None:
    class Inner:
        info = "info"
        told: list[Any] = []

        def add(self, requests: list[Any]) -> None:
            self.told.append(requests)

        def abort(self, request_ids: list[str]) -> None:
            self.told.append(request_ids)

        def receive(self, timeout_s: float | None) -> None:
            self.told.append(timeout_s)

        def close(self) -> None:
            self.told.append("closed")

    client = TimedClient(Inner())  # type: ignore[arg-type]
    client.add([])
    client.abort(["a"])
    assert client.receive(1.5) is None and client.info == "info"
    client.close()
    assert Inner.told == [[], ["a"], 1.5, "closed"]


def test_command_writes_vllms_names(fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["bench", "latency", "m", "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0", "--input-len", "6"]
    assert cli.main([*words, "--output-len", "5", "--disable-detokenize", "--seed", "7", "--output-json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("m: 6 prompt and 5 output tokens, 2 runs\nBatch size 2\n  Avg latency: ") and "  Decode: " in out
    document = json.loads(path.read_text())
    assert document["avg_latency"] == sum(document["latencies"]) / 2 and set(document["percentiles"]) == {
        *("10", "25", "50", "75", "90", "99")
    }
    assert document["results"] == [{name: document[name] for name in document["results"][0]}]
    assert (document["model"], document["output_len"], document["seed"], document["temperature"]) == ("m", 5, 7, 1.0)
    assert document["environment"]["versions"]["halfbyte"] == halfbyte.__version__
    assert fake_engine.closed and fake_engine.options[0].seed == 7
    assert not fake_engine.batches[0][0].sampling.detokenize


def test_several_sizes_stand_in_a_list(fake_engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ["bench", "latency", "--batch-size", "1,4", "2", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert cli.main([*words, "--output-json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [result["batch_size"] for result in document["results"]] == document["batch_sizes"] == [1, 4, 2]
    assert "avg_latency" not in document


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "0"], "--batch-size must be positive integers, such as 1 8 32, got 0"),
        (["--output-len", "0"], "--output-len must be at least 1, got 0"),
        (["--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["--temperature", "nan"], "--temperature must be in [0, 2], got nan"),
        (["--use-beam-search"], "--use-beam-search is not supported yet: there is no beam search; use --n"),
        (["--profile"], "--profile is not supported yet: start the command under a profiler of your choice"),
        (["--output-json", "/no/such/folder/x"], "--output-json: '/no/such/folder/x' must be a file in a folder that exists"),
    ],
)
def test_wrong_flags(words: list[str], message: str, fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "latency", *words]) == 2
    assert capsys.readouterr().err == f"halfbyte: error: {message}\n"
    assert not fake_engine.options


def test_greedy_sequences_are_refused_before_the_model_loads(fake_engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "latency", "--n", "2", "--temperature", "0"]) == 1
    assert "n=2 needs temperature > 0" in capsys.readouterr().err and not fake_engine.options

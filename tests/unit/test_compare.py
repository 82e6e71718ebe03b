"""`benchmarks/compare.py` with engines made of a few lines: turns, pauses, ratios, what is wrong, and what a spec may say."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.adapters import worker
from benchmarks.compare import Case, EngineProcess, Results, read_spec
from halfbyte.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SPECS = sorted((ROOT / "benchmarks" / "specs").glob("*.json"))
NOWHERE = {"peers": Path("/peers"), "models": Path("/models")}

# An engine of whole seconds: its tokens are a sum over the prompt. Options bend it.
STUB = """
import json, os, time

print("chatter while importing")

class Engine:
    def __init__(self, settings):
        self.settings, self.options = settings, settings["options"]
        if self.options.get("fails") == "load":
            raise RuntimeError("no such weights")

    def versions(self):
        return {"stub": "1.0", "dtype": self.settings["dtype"], "threads": os.environ["OMP_NUM_THREADS"]}

    def generate(self, prompts, output_len):
        print("chatter while running")
        with open(self.settings["model"], "a") as log:
            print(json.dumps([self.options["name"], prompts, output_len]), file=log)
        if self.options.get("fails") == "run" and output_len > 4:
            os._exit(3)
        shift, missing = self.options.get("shift", 0), self.options.get("missing", 0)
        start_s = time.perf_counter() + 1.0
        times = [start_s + step * self.options["step_s"] for step in range(output_len - missing)]
        return [[((sum(prompt) + step + shift) % 50, seen_s) for step, seen_s in enumerate(times)] for prompt in prompts]
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured of the machine and said of it takes seconds, and is others' to test."""
    monkeypatch.setattr(compare, "environment", lambda: {"commit": "abc"})
    monkeypatch.setattr(compare, "LIMITS_MODULE", "halfbyte.kernels.no_such_module")


MakeSpec = Callable[..., Path]


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    """Writes a spec of stub engines: name -> their options. `tmp_path / "log"` gets a line for every call."""

    def make(engines: dict[str, dict[str, Any]], **changes: Any) -> Path:
        (tmp_path / "stub.py").write_text(STUB)
        entries = {
            name: {
                "adapter": str(tmp_path / "stub.py"),
                "model": "{models}/log",
                "dtype": "float32",
                "options": {"name": name, "step_s": 1.0} | options,
            }
            for name, options in engines.items()
        }
        document = {
            "cases": ["d1", "d2", "p8"],
            "prompt_len": 4,
            "output_len": 6,
            "num_threads": 1,
            "max_model_len": 16,
            "max_num_seqs": 2,
            "token_ids": [10, 90],
            "expect_agreement": {"num_tokens": 3, "share": 1.0},
            "engines": entries,
        }
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(document | changes))
        return path

    return make


def calls(tmp_path: Path) -> list[tuple[str, list[list[int]], int]]:
    return [tuple(json.loads(line)) for line in (tmp_path / "log").read_text().splitlines()]


def test_engines_take_turns_on_the_same_fresh_prompts(make_spec: MakeSpec, tmp_path: Path) -> None:
    path = make_spec({"a": {}, "b": {}, "c": {}})
    assert compare.main([str(path), "--models", str(tmp_path), "--reps", "2", "--cases", "d1", "d2"]) == 0
    made = calls(tmp_path)
    assert [name for name, _, _ in made] == ["a", "b", "c"] * 6
    turns = [made[start : start + 3] for start in range(0, len(made), 3)]
    prompts = []
    for turn in turns:
        assert len({json.dumps(batch) for _, batch, _ in turn}) == 1
        prompts += turn[0][1]
    assert [(len(turn[0][1]), turn[0][2]) for turn in turns] == [(1, 4), (2, 4), (1, 6), (2, 6), (1, 6), (2, 6)]
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 9
    assert all(len(prompt) == 4 and all(10 <= token_id < 90 for token_id in prompt) for prompt in prompts)


@pytest.mark.parametrize(("seed", "equal"), [(["--seed", "5"], True), ([], False)])
def test_seed_repeats_the_prompts(make_spec: MakeSpec, tmp_path: Path, seed: list[str], equal: bool) -> None:
    path = make_spec({"a": {}, "b": {}})
    for _ in range(2):
        assert compare.main([str(path), "--models", str(tmp_path), "--reps", "1", "--cases", "d2", *seed]) == 0
    made = calls(tmp_path)
    assert (made[:4] == made[4:]) is equal


def test_output(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as fast in every repetition is a ratio of 2 without a spread, in the table and in the file."""
    out = tmp_path / "out.json"
    path = make_spec({"fast": {"step_s": 0.5}, "slow": {}})
    assert compare.main([str(path), "--models", str(tmp_path), "--reps", "3", "--out", str(out), "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert "### d2: 2 x 4 prompt tokens, 6 output tokens each" in printed
    assert "| decode, tokens/s | median | min - max | fast: times as fast | min - max | equal first tokens |" in printed
    assert (
        "| fast | 4.0 | 4.0 - 4.0 |  |  |  |" in printed and "| slow | 2.0 | 2.0 - 2.0 | 2.00 | 2.00 - 2.00 | 100% |" in printed
    )
    result = json.loads(out.read_text())
    assert result["environment"] == {"commit": "abc"} and result["limits"] is None and result["seed"] == 1
    assert result["spec"] == json.loads(path.read_text()) and result["wrong_output"] == []
    assert result["agreement"] == {"d1": {"slow": 1.0}, "d2": {"slow": 1.0}, "p8": {"slow": 1.0}}
    ratio = result["summary"]["d2"]["decode"]["slow"]["times_as_fast"]
    assert {name: round(value, 9) for name, value in ratio.items()} == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert set(result["summary"]["p8"]) == {"prefill"} and set(result["summary"]["d1"]) == {"decode", "whole call", "prefill"}
    assert [run["num_decoded_tokens"] for run in result["runs"]["d2"]["slow"]] == [10, 10, 10]
    assert "token_ids" not in result["runs"]["d2"]["slow"][0]
    engine = result["engines"]["slow"]
    assert engine["versions"] == {"stub": "1.0", "dtype": "float32", "threads": "1"}
    assert engine["pss_bytes"] > 1 << 20 and engine["load_s"] > 0


def test_wrong_tokens_fail(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_spec({"a": {}, "right": {}, "wrong": {"shift": 1}})
    assert compare.main([str(path), "--models", str(tmp_path), "--reps", "1", "--cases", "d1"]) == 1
    complaint = "0% of wrong's requests begin like the first engine's, not 100%"
    assert capsys.readouterr().err == f"compare: wrong output: {complaint}\n"


def test_wrong_number_of_tokens_fails(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_spec({"a": {}, "b": {"missing": 2}}, expect_agreement={"num_tokens": 1, "share": 0.0})
    assert compare.main([str(path), "--models", str(tmp_path), "--reps", "1", "--cases", "d1"]) == 1
    assert capsys.readouterr().err == "compare: wrong output: d1: b made [4] tokens per request instead of 6\n"


@pytest.mark.parametrize(("fails", "word"), [("load", "load"), ("run", "run")])
def test_engine_that_ends_is_named(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: str, word: str
) -> None:
    path = make_spec({"a": {}, "b": {"fails": fails}})
    assert compare.main([str(path), "--models", str(tmp_path), "--reps", "1", "--cases", "d1"]) == 1
    errors = capsys.readouterr().err
    assert errors.endswith(f"compare: error: b ended while it was asked to {word}\n")
    assert "chatter while importing" in errors and ("no such weights" in errors) is (fails == "load")


def test_engine_whose_python_is_not_there(make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_spec({"a": {}})
    document = json.loads(path.read_text())
    document["engines"]["a"]["python"] = "{peers}/a/bin/python"
    path.write_text(json.dumps(document))
    assert compare.main([str(path), "--peers", str(tmp_path), "--models", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"compare: error: a cannot be started: {tmp_path}/a/bin/python: No such file or directory\n"


@pytest.fixture
def stub_engine(make_spec: MakeSpec, tmp_path: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(read_spec(make_spec({"a": {}}), {"models": tmp_path}).engines[0])
    yield engine
    engine.close()


def test_engine_is_stopped_between_its_turns(stub_engine: EngineProcess) -> None:
    """Its state is T (stopped by a signal), and the memory of a stopped process can still be read."""
    pid = stub_engine._process.pid
    for _ in range(2):
        assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT) is not None
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        assert stub_engine.pss_bytes() > 1 << 20
        stub_engine.measure([[1, 2]], 2)


def test_closed_engine_is_gone(stub_engine: EngineProcess) -> None:
    stub_engine.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(stub_engine._process.pid, 0)


def test_decoding_is_timed_from_the_moment_when_all_have_begun() -> None:
    """Tokens of the step that ends the prefill are not counted, whoever's they are."""

    class Engine:
        def generate(self, prompts: list[list[int]], output_len: int) -> list[list[tuple[int, float]]]:
            return [[(7, 11.0), (8, 12.0), (9, 13.0)], [(4, 12.0), (5, 13.0), (6, 14.5)]]

    times = iter([10.0, 15.0])
    run = worker.measure(Engine(), [[1], [2]], 3, clock=lambda: next(times))
    assert run == {
        "first_tokens_s": 2.0,
        "decode_s": 2.5,
        "num_decoded_tokens": 3,
        "call_s": 5.0,
        "token_ids": [[7, 8, 9], [4, 5, 6]],
    }
    case = Case.from_name("d2", prompt_len=8, output_len=3)
    assert case.speeds(run) == {"decode": 3 / 2.5, "whole call": 6 / 5.0, "prefill": 16 / 2.0}


def test_ratios_are_taken_within_repetitions() -> None:
    """A machine that halves its speed for one repetition changes no ratio."""
    case = Case("p10", 1, 10, 1)
    spec = compare.Spec((), (case,), range(1, 2), 1, 0.0, 1)
    results = Results(spec)
    for seconds in (1.0, 2.0, 1.0):
        for engine, slowness in (("a", 1.0), ("b", 4.0)):
            results.add(case, engine, {"first_tokens_s": seconds * slowness, "token_ids": [[1]]})
    row = compare.summary(results, case)["prefill"]["b"]
    assert (row["times_as_fast"].median, row["times_as_fast"].min, row["times_as_fast"].max) == (4.0, 4.0, 4.0)
    assert (row["tokens_per_s"].median, row["tokens_per_s"].min, row["tokens_per_s"].max) == (2.5, 1.25, 2.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("d1", (1, 128, 64)), ("d32", (32, 128, 64)), ("p1024", (1, 1024, 1)), ("p128x8", (8, 128, 1))],
)
def test_case_names(name: str, expected: tuple[int, int, int]) -> None:
    case = Case.from_name(name, prompt_len=128, output_len=64)
    assert (case.batch_size, case.prompt_len, case.output_len) == expected
    prompts = case.prompts(random.Random(1), range(5, 9))
    assert [len(prompt) for prompt in prompts] == [case.prompt_len] * case.batch_size


@pytest.mark.parametrize("name", ["", "d", "d0", "8", "p", "p8x", "p8x0", "x8", "d8x2", "d-1"])
def test_unknown_cases(name: str) -> None:
    with pytest.raises(UserError, match="no case"):
        Case.from_name(name, 128, 64)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_committed_specs(path: Path) -> None:
    """They can be read, and name no place of the machine that they were written on."""
    spec = read_spec(path, NOWHERE)
    assert spec.engines[0].name.startswith("halfbyte") and spec.min_share > 0
    assert '"/' not in path.read_text() and "~" not in path.read_text()


def test_spec_in_the_readme(tmp_path: Path) -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    (tmp_path / "spec.json").write_text(text.partition("```json\n")[2].partition("```")[0])
    assert [engine.name for engine in read_spec(tmp_path / "spec.json", NOWHERE).engines] == ["mine", "theirs"]


def test_there_are_specs() -> None:
    assert {path.stem for path in SPECS} >= {"bf16", "q4_1", "smoke"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cores": 2}, "has no key 'cores'; the keys are about, cases"),
        ({"prompt_len": "4"}, "prompt_len must be of type int, got '4'"),
        ({"cases": ["d4"]}, "case d4 does not fit max_num_seqs or max_model_len"),
        ({"output_len": 13}, "case d1 does not fit"),
        ({"token_ids": [1]}, "token_ids must be the first id and the one after the last"),
        ({"expect_agreement": {"num_tokens": 3}}, "expect_agreement of .* lacks share"),
        ({"engines": {}}, "the first engine"),
        ({"engines": {"a": {"model": "m"}}}, "engine 'a' of .* lacks adapter"),
        ({"engines": {"a": {"model": "m", "adapter": "sglang"}}}, "no adapter 'sglang': name halfbyte, transformers, vllm"),
        ({"engines": {"a": {"model": "{peers}/m", "adapter": "vllm"}}}, "say where that is with --peers DIR"),
        ({"engines": {"a": {"model": "m", "adapter": "vllm", "cases": ["d1"]}}}, "must exist and take part in all cases"),
    ],
)
def test_wrong_specs(make_spec: MakeSpec, changes: dict[str, Any], message: str) -> None:
    path = make_spec({"a": {}})
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        read_spec(path, {"peers": None, "models": Path("m")})


def test_spec_that_is_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spec.json").write_text("{")
    assert compare.main([str(tmp_path / "spec.json")]) == 2
    assert "compare: error: cannot read the spec" in capsys.readouterr().err
    assert compare.main([str(tmp_path / "none.json")]) == 2


def test_engines_may_sit_cases_out(make_spec: MakeSpec, tmp_path: Path) -> None:
    path = make_spec({"a": {}, "b": {}})
    document = json.loads(path.read_text())
    document["engines"]["b"]["cases"] = ["p8"]
    path.write_text(json.dumps(document))
    assert compare.main([str(path), "--models", str(tmp_path), "--reps", "1"]) == 0
    assert [name for name, _, _ in calls(tmp_path)] == ["a", "a", "a", "b"] * 2


def test_limits_come_from_the_kernels_own_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compare.measure_limits(2) is None
    (tmp_path / "stub_limits.py").write_text('def measure(num_threads):\n    print("x")\n    return {"threads": num_threads}\n')
    monkeypatch.setattr(compare, "LIMITS_MODULE", "stub_limits")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert compare.measure_limits(2) == {"threads": 2}


def test_limits_that_cannot_be_measured_say_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stub_broken_limits.py").write_text('def measure(num_threads):\n    raise RuntimeError("no kernels")\n')
    monkeypatch.setattr(compare, "LIMITS_MODULE", "stub_broken_limits")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert compare.measure_limits(2) == {"not_measured": "RuntimeError: no kernels"}
    assert capsys.readouterr().err == "the machine's limits are not measured: RuntimeError: no kernels\n"

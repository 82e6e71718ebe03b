"""The command `bench serve` as a whole, against a stub of an OpenAI-compatible server that answers at once."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from halfbyte.entrypoints.bench import serve
from halfbyte.entrypoints.bench.serve_flags import FLAGS, REFUSED, read_plan
from halfbyte.entrypoints.flags import UsageError
from halfbyte.errors import HalfbyteError

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kite", "lark", "mole", "newt", "owl", "pig"]


def make_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="ant"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


class Stub(BaseHTTPRequestHandler):
    """Answers with as many chunks as tokens were asked for."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []
    num_to_refuse = 0
    interrupts = False
    reset_answer = '{"success": true}'
    tokenizer = make_tokenizer()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "tiny", "root": "/nowhere/tiny"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null")
        if self.path == "/tokenize":
            self._answer(200, json.dumps({"tokens": self.tokenizer.encode(body["prompt"]).ids}))
            return
        if self.path == "/detokenize":
            self._answer(200, json.dumps({"prompt": self.tokenizer.decode(body["tokens"])}))
            return
        self.seen.append((self.path, body, dict(self.headers)))
        if self.path == "/reset_prefix_cache":
            self._answer(200, self.reset_answer)
            return
        if self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            self.rfile.read(1)  # until the client has gone
            return
        if len(self.seen) <= self.num_to_refuse:
            self._answer(500, json.dumps({"error": {"message": "no room"}}))
            return
        chat = "messages" in body
        num_tokens = body["max_completion_tokens" if chat else "max_tokens"]
        choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
        usage = {"prompt_tokens": 7, "completion_tokens": num_tokens, "prompt_tokens_details": {"cached_tokens": 2}}
        events = [{"choices": [choice]}] * num_tokens + [{"choices": [choice | {"finish_reason": "length"}]}]
        events.append({"choices": [], "usage": usage})
        self._answer(200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Stub, "seen", [])
    monkeypatch.delenv("HALFBYTE_API_KEY", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    # what the machine is, is not what is tested here
    monkeypatch.setattr(serve, "environment", lambda: {"commit": "c0ffee"})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer, and nothing else of a model."""
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def bench(url: str, folder: Path, *words: str) -> int:
    shape = ["--random-input-len", "6", "--random-output-len", "3", "--num-prompts", "4"]
    return serve.run(["--base-url", url, "--tokenizer", str(folder), *shape, "--disable-tqdm", *words])


def test_requests_carry_what_was_asked(url: str, folder: Path) -> None:
    words = ["--ignore-eos", "--temperature", "0", "--top-k", "5", "--header", "X-Team=blue", "--api-key", "k"]
    assert (
        bench(url, folder, *words, "--request-id-prefix", "run-", "--extra-body", '{"priority": 3}', "--endpoint", "/v1/x") == 0
    )
    assert len(Stub.seen) == 4
    for path, body, headers in Stub.seen:
        prompt = body.pop("prompt")
        assert len(prompt) == 6 and all(type(token_id) is int for token_id in prompt)
        sampling = {"ignore_eos": True, "temperature": 0.0, "top_k": 5, "priority": 3}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        assert (path, body) == ("/v1/x", {"model": "tiny", "max_tokens": 3} | stream | sampling)
        assert (headers["X-Team"], headers["Authorization"]) == ("blue", "Bearer k")
    assert {headers["X-Request-Id"] for _, _, headers in Stub.seen} == {f"run-{index}" for index in range(4)}


def test_chat_requests_carry_text(url: str, folder: Path) -> None:
    assert bench(url, folder, "--backend", "openai-chat", "--model", "other", "--num-warmups", "2") == 0
    assert len(Stub.seen) == 6, "two warm-ups"
    for path, body, _ in Stub.seen:
        [message] = body["messages"]
        assert (path, body["model"], body["max_completion_tokens"]) == ("/v1/chat/completions", "other", 3)
        assert message["role"] == "user" and len(message["content"].split()) == 6
    assert len({body["messages"][0]["content"] for _, body, _ in Stub.seen}) == 6, "warm-ups have prompts of their own"


def test_report_and_saved_result(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--save-result", "--save-detailed", "--result-dir", str(folder / "new"), "--result-filename", "r.json"]
    assert bench(url, folder, *words, "--seed", "7", "--metadata", "build=fast", "--goodput", "ttft:60000") == 0
    out = capsys.readouterr().out
    assert "Successful requests:                                     4" in out and "P99 E2EL (ms):" in out
    result = json.loads((folder / "new" / "r.json").read_text())
    expected = {
        "backend": "openai",
        "model_id": "tiny",
        "tokenizer_id": str(folder),
        "dataset_name": "random",
        "num_prompts": 4,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "seed": 7,
        "build": "fast",
        "completed": 4,
        "failed": 0,
        "total_input_tokens": 28,
        "total_output_tokens": 12,
        "total_cached_tokens": 8,
        "output_lens": [3] * 4,
        "generated_texts": ["xxxx"] * 4,
        "errors": [""] * 4,
    }
    assert {name: result[name] for name in expected} == expected
    assert result["request_goodput"] == result["request_throughput"] > 0
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p99")} <= set(result)
    assert result["environment"] == {"commit": "c0ffee"}


def test_a_seed_repeats_the_prompts_and_none_brings_new_ones(url: str, folder: Path) -> None:
    def prompts(*words: str) -> list[tuple[int, ...]]:
        Stub.seen.clear()
        bench(url, folder, *words)
        return sorted(tuple(body["prompt"]) for _, body, _ in Stub.seen)

    assert prompts("--seed", "3") == prompts("--seed", "3")
    assert prompts() != prompts()


def test_a_sweep_runs_every_value_and_is_plotted(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, picture = folder / "all.jsonl", folder / "out.png"
    words = ["--max-concurrency", "1", "2", "--append-result", "--result-dir", str(folder), "--result-filename", lines.name]
    assert bench(url, folder, *words, "--plot", str(picture)) == 0
    results = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [result["max_concurrency"] for result in results] == [1, 2]
    assert [result["max_concurrent_requests"] for result in results][0] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len({tuple(body["prompt"]) for _, body, _ in Stub.seen}) == 8, "no run finds the prompts of another in a cache"
    assert capsys.readouterr().out.count("Serving Benchmark Result") == 2


@pytest.mark.parametrize("answer", ['{"success": true}', ""])  # ours, vLLM's
def test_d08_each_run_can_begin_with_an_empty_cache(answer: str, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "reset_answer", answer)
    monkeypatch.setenv("HALFBYTE_ADMIN_API_KEY", "of operators")
    words = ["--max-concurrency", "1", "4", "--api-key", "k", "--save-result", "--result-dir", str(folder / "r")]
    assert bench(url, folder, *words, "--reset-prefix-cache") == 0
    paths = [path for path, _, _ in Stub.seen]
    assert paths == ["/reset_prefix_cache", *["/v1/completions"] * 4] * 2
    keys = {path: headers["Authorization"] for path, _, headers in Stub.seen}
    assert keys == {"/reset_prefix_cache": "Bearer of operators", "/v1/completions": "Bearer k"}
    results = [json.loads(path.read_text()) for path in (folder / "r").iterdir()]
    assert [result["reset_prefix_cache"] for result in results] == [True, True]


def test_a_cache_that_cannot_be_emptied_ends_the_run(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "reset_answer", '{"success": false}')
    with pytest.raises(HalfbyteError, match="/reset_prefix_cache did not empty the cache"):
        bench(url, folder, "--reset-prefix-cache", "--admin-api-key", "a")
    assert [path for path, _, _ in Stub.seen] == ["/reset_prefix_cache"]


def test_the_files_of_a_sweep_have_names_of_their_own(url: str, folder: Path) -> None:
    assert bench(url, folder, "--request-rate", "1000", "inf", "--save-result", "--result-dir", str(folder / "out")) == 0
    names = sorted(path.name for path in (folder / "out").iterdir())
    assert [name.split("-tiny-")[0] for name in names] == ["openai-1000.0qps", "openai-infqps"]


def test_failed_requests_are_counted(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Stub, "num_to_refuse", 1)
    assert bench(url, folder) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in out if line.startswith(("Successful", "Failed"))] == ["3", "1"]
    assert out[-1] == "failed 1 times: HTTP 500: no room"


def test_when_all_fail_the_command_fails(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "num_to_refuse", 99)
    with pytest.raises(HalfbyteError, match=r"^all 4 requests failed: HTTP 500: no room$"):
        bench(url, folder)
    with pytest.raises(HalfbyteError, match=r"^a warm-up request failed: HTTP 500: no room$"):
        bench(url, folder, "--num-warmups", "1")
    with pytest.raises(HalfbyteError, match=r"not ready within .*/v1/completions answers 500"):
        bench(url, folder, "--ready-check-timeout-sec", "0.001")


def test_ctrl_c_ends_the_run(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "interrupts", True)
    with pytest.raises(KeyboardInterrupt):
        bench(url, folder, "--max-concurrency", "1")


def test_the_server_tokenises_where_nothing_else_can(url: str) -> None:
    shape = ["--random-input-len", "6", "--random-output-len", "3", "--num-prompts", "2", "--disable-tqdm"]
    assert serve.run(["--base-url", url, *shape]) == 0
    for _, body, _ in Stub.seen:
        assert len(body["prompt"]) == 6


def test_without_any_tokenizer_the_line_says_so(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "do_POST", lambda self: self._answer(404, "no such route"))
    with pytest.raises(HalfbyteError, match="there is no tokenizer for 'tiny'.*answers 404: no such route.*--tokenizer"):
        serve.run(["--base-url", url])


@pytest.mark.parametrize("package", ["aiohttp", "matplotlib"])
def test_a_missing_package_is_one_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(HalfbyteError, match=f"^bench serve needs {package}, .*: pip install {package}$"):
        serve.run(["--plot", "out.png"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--admin-api-key", "k"], "--admin-api-key is for --reset-prefix-cache: give both"),
        (["--request-rate", "0"], "--request-rate must be numbers above 0, got '0'"),
        (["--request-rate", "nan"], "--request-rate must be numbers above 0, got 'nan'"),
        (["--max-concurrency", "1.5"], "--max-concurrency must be integers above 0, got '1.5'"),
        (["--request-rate", "1", "2", "--max-concurrency", "1", "2"], "one of --request-rate and --max-concurrency can be swept"),
        (["--burstiness", "2"], "--burstiness is about the gaps between requests: it needs a finite --request-rate"),
        (["--header", "X=é"], "--header must be printable ASCII"),
        (["--api-key", "é"], "a server's key must be printable ASCII"),
        (["--burstiness", "0"], "--burstiness must be above 0, got 0"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--ready-check-timeout-sec", "-1"], "--ready-check-timeout-sec must be in [0, 1e+09], got -1"),
        (["--base-url", "http://x", "--port", "1"], "--base-url already says where the server is"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together"),
        (["--goodput", "itl:5"], "--goodput: 'itl' is not one of ttft, tpot, e2el"),
        (["--goodput", "ttft"], "--goodput: expected a name and a value, as in NAME:VALUE, got 'ttft'"),
        (["--goodput", "ttft:x"], "--goodput must be numbers above 0, got 'x'"),
        (["--header", "X"], "--header: expected a name and a value, as in NAME=VALUE, got 'X'"),
        (["--percentile-metrics", "ttft,foo"], "--percentile-metrics: 'foo' is not one of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "--metric-percentiles must be numbers from 0 to 100, such as 50,99, got '101'"),
        (["--save-detailed"], "--save-detailed is for --save-result: give both"),
        (["--result-dir", "x"], "--result-dir is for --save-result: give both"),
        (["--request-rate", "1", "2", "--save-result", "--result-filename", "r"], "the runs of a sweep cannot share a file"),
        (["--backend", "tgi"], "--backend: 'tgi' is not one of openai, openai-chat"),
        (["--lora-modules", "a"], "--lora-modules is not supported yet: there are no adapters"),
        (["--use-beam-search"], "--use-beam-search is not supported yet: answers are streamed"),
    ],
)
def test_wrong_usage(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_plan(words)
    assert str(caught.value).startswith(message)


def test_ramp_up_excludes_a_rate() -> None:
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"]
    assert read_plan(ramp).given["ramp_up_end_rps"] == 2.0
    with pytest.raises(UsageError, match="leave --request-rate out"):
        read_plan([*ramp, "--request-rate", "3"])


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must end in one of .*png"):
        serve.run(["--plot", str(tmp_path / "out.docx")])
    with pytest.raises(UsageError, match="must be in a folder that exists"):
        serve.run(["--plot", str(tmp_path / "no" / "out.png")])


def test_the_key_comes_from_the_environment_and_flags_are_unique() -> None:
    assert read_plan([], {"HALFBYTE_API_KEY": "k"}).headers == {"Authorization": "Bearer k"}
    assert read_plan([], {}).base_url == "http://127.0.0.1:8000"
    spellings = [spelling for flag in FLAGS for spelling in flag.spellings]
    assert len(spellings) == len(set(spellings)) and not set(spellings) & set(REFUSED)


def test_the_page_names_flags_that_exist() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "bench_serve.md").read_text(encoding="utf-8")
    known = {spelling for flag in FLAGS for spelling in flag.spellings} | {"--help"}
    known |= {"--enable-prompt-tokens-details", "--enable-admin"}  # the server's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", page)) <= known

"""The `halfbyte` command: exit codes, one line per error, how fast it answers, and what each command does with its flags."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import halfbyte
from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.entrypoints import cli
from halfbyte.entrypoints.commands import bench
from halfbyte.entrypoints.flag_table import kv_cache_dtypes
from halfbyte.entrypoints.flags import parse
from halfbyte.errors import HalfbyteError, ModelFileError, UserError
from halfbyte.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Sequence[str]], int]], None]:
    """Puts a function in the place of `halfbyte serve`."""

    def replace(run: Callable[[Sequence[str]], int]) -> None:
        monkeypatch.setattr(import_module("halfbyte.entrypoints.commands.serve"), "run", run)

    return replace


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def run(argv: Sequence[str]) -> int:
        raise error

    return run


def child_cpu_s(*words: str) -> float:
    """CPU seconds of a Python process, the best of three: other work on the machine does not count."""
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(times)


def test_import_is_fast() -> None:
    assert child_cpu_s("-c", "import halfbyte") < 0.1


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]])
def test_help_is_fast(words: list[str]) -> None:
    assert child_cpu_s("-m", "halfbyte", *words) < 0.5


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: halfbyte {name}") and "--log-level" in out


@pytest.mark.parametrize("word", ["-v", "--version"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 0
    assert capsys.readouterr().out == f"halfbyte {halfbyte.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "unknown command 'serv'; did you mean serve?"),
        (["--port", "1"], "unknown command '--port'; see halfbyte --help"),
        (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["serve", "-tp", "2"], "-tp is not supported yet: this version runs on one device"),
        (
            ["serve", "--kv-cache-dtype", "fp8_inc"],
            "--kv-cache-dtype fp8_inc is not supported; possible here: auto, fp8, bfloat16",
        ),
        (["generate"], "generate needs a prompt"),
        (["bench"], "bench needs a kind: halfbyte bench latency|throughput|serve|startup|kernels"),
        (["bench", "--batch-size", "8"], "bench needs a kind: halfbyte bench latency|throughput|serve|startup|kernels"),
        (["bench", "latncy"], "unknown kind 'latncy'; did you mean latency?"),
        (["bench", "quantum"], "unknown kind 'quantum': halfbyte bench latency|throughput|serve|startup|kernels"),
        (["fetch", "a", "b"], "unrecognized arguments: b"),
        (["calibrate", "m", "--kv-cache-dtype", "kv4"], "unknown flag --kv-cache-dtype"),
    ],
)
def test_wrong_usage_is_one_line_and_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"halfbyte: error: {message}") and captured.err.count("\n") == 1


@pytest.mark.parametrize("error", [ModelFileError("w.safetensors has 3 bytes,\nexpected 7"), UserError("a"), HalfbyteError("b")])
def test_halfbyte_error_is_one_line_and_1(
    error: HalfbyteError, command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(error))
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == f"halfbyte: error: {error}".replace("\n", "\\n") + "\n"


def test_debug_adds_the_traceback(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(ModelFileError("bad file")))
    assert cli.main(["serve", "--log-level", "debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("halfbyte: error: bad file\n")


def test_ctrl_c_is_130(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(KeyboardInterrupt()))
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err == ""


def test_exit_code_of_the_command(command: Callable[..., None]) -> None:
    command(lambda argv: 7)
    assert cli.main(["serve"]) == 7


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "halfbyte", "nope"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "halfbyte: error: unknown command 'nope'; see halfbyte --help\n"


def test_a_reader_that_is_gone_is_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "halfbyte", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert done.returncode == 1 and done.stderr == ""


def test_serve_hands_its_flags_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    launch = SimpleNamespace(serve=lambda options, server: seen.extend([options, server]) or 3)
    monkeypatch.setitem(sys.modules, "halfbyte.entrypoints.launch", launch)
    monkeypatch.delenv("HALFBYTE_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert cli.main(["serve", "m", "--max-num-seqs", "3", "--port", "81"]) == 3
    assert seen == [EngineOptions(model="m", max_num_seqs=3), ServerConfig(port=81)]


@dataclass
class FakeLLM:
    """Stands in for `halfbyte.LLM`: answers with as many tokens as were asked."""

    options: dict[str, Any]
    calls: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    closed: bool = False

    def generate(self, prompts: list[Any], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.calls.append((prompts, params))
        ids = [1] * (params.max_tokens or 0)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(text=" Paris.", token_ids=ids, finish_reason="length")]) for _ in prompts
        ]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def llms(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    made: list[FakeLLM] = []

    def make(**options: Any) -> FakeLLM:
        made.append(FakeLLM(options))
        return made[-1]

    monkeypatch.setitem(vars(halfbyte), "LLM", make)
    return made


def test_generate(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "The capital of France is", "--max-tokens", "5", "--stop", ".", "--seed", "3", "--model", "m"]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == " Paris.\n"
    [llm] = llms
    [(prompts, params)] = llm.calls
    assert llm.options == {"seed": 3, "model": "m"} and llm.closed
    assert prompts == ["The capital of France is"]
    assert (params.max_tokens, params.temperature, params.stop) == (5, 0.0, ["."])


def test_generate_checks_sampling(llms: list[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "x", "--temperature", "3"]) == 1
    assert "temperature must be in [0.0, 2.0], got 3.0" in capsys.readouterr().err
    assert not llms


@pytest.mark.parametrize("words", [["bench", "--help"], ["bench", "-h"], ["bench", "help"]])
def test_bench_names_every_kind(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {kind} " in out for kind in bench.KINDS)


@pytest.mark.parametrize("kind", sorted(bench.KINDS))
def test_every_kind_of_bench_has_help(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", kind, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: halfbyte bench {kind}") and "--log-level" in out


def test_bench_hands_its_words_over(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setitem(bench.KINDS, "latency", ("fake_kind", ""))
    monkeypatch.setitem(sys.modules, "fake_kind", SimpleNamespace(run=lambda argv: seen.append(argv) or 3))
    assert cli.main(["bench", "latency", "m", "--batch-size", "1"]) == 3
    assert seen == [["m", "--batch-size", "1"]]


BENCH_PAGE = (ROOT / "docs/bench.md").read_text()
BENCH_EXAMPLES = re.findall(r"^halfbyte (bench .*)$", "\n".join(re.findall(r"```sh\n(.*?)```", BENCH_PAGE, re.S)), re.M)


@pytest.mark.parametrize("line", BENCH_EXAMPLES)
def test_examples_of_the_bench_page_parse(line: str) -> None:
    _, kind, *words = shlex.split(line)
    module = import_module(bench.KINDS[kind][0])
    parse(kind, "", module.FLAGS, words)


def test_bench_page_has_every_dataset_flag() -> None:
    from halfbyte.entrypoints.bench.datasets import DATASET_FLAGS

    assert len(BENCH_EXAMPLES) >= 4
    assert all(f"`--{flag.name}`" in BENCH_PAGE for flag in DATASET_FLAGS)


def test_fetch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from halfbyte.model_runner import catalogue

    assert cli.main(["fetch"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m ")

    def fetch(name: str, report: Callable[[str], None]) -> Path:
        report("downloading")
        return Path("/cache") / name

    monkeypatch.setattr(catalogue, "fetch", fetch)
    assert cli.main(["fetch", "smollm2-135m"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("/cache/smollm2-135m\n", "downloading\n")


def test_collect_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"halfbyte", "python", "cpu", "threads granted", "memory limit", "torch", "gpus"} <= {
        line[:20].strip() for line in lines
    }


def test_support_plain_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support"]) == 0
    plain = capsys.readouterr().out
    assert cli.main(["support", "--markdown"]) == 0
    markdown = capsys.readouterr().out
    for text in (plain, markdown):
        assert all(
            name in text for name in ("LlamaForCausalLM", "Gemma3ForCausalLM", *kv_cache_dtypes()[1:], "reference", "ROCm")
        )
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert all(line.endswith(" |") for line in rows) and len(rows) > 8


class _Server(BaseHTTPRequestHandler):
    """A few lines of an OpenAI-compatible server."""

    seen: list[tuple[str, dict[str, Any], str | None]] = []

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body, self.headers.get("Authorization")))
        if body["messages"][-1]["content"] == "refuse":
            self._answer(400, json.dumps({"error": {"message": "no such thing", "code": 400}}))
            return
        deltas = [{"role": "assistant", "content": ""}, {"content": "Par"}, {"content": "is"}, {}]
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas] + ["[DONE]"]
        if body["messages"][-1]["content"] == "die":
            events = [json.dumps({"error": {"message": "engine died"}})]
        self._answer(200, "".join(f"data: {event}\n\n" for event in events))

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_Server, "seen", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_quick(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "chat",
        "--url",
        url,
        "-q",
        "Capital of France?",
        "--system-prompt",
        "Be brief.",
        "--api-key",
        "k",
        "--temperature",
        "0",
    ]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == "Paris\n"
    [(path, body, authorization)] = _Server.seen
    assert (path, authorization) == ("/v1/chat/completions", "Bearer k")
    assert body == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}],
        "stream": True,
        "temperature": 0.0,
    }


def test_chat_remembers_the_conversation(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["first", "  ", "second"])

    def type_in(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", type_in)
    assert cli.main(["chat", "--url", url, "--model-name", "named"]) == 0
    assert capsys.readouterr().out == "Paris\nParis\n"
    body = _Server.seen[-1][1]
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("user", "first"),
        ("assistant", "Paris"),
        ("user", "second"),
    ]
    assert body["model"] == "named"


@pytest.mark.parametrize(
    ("message", "error"),
    [("refuse", "/v1/chat/completions answers 400: no such thing"), ("die", "the server ended the answer: engine died")],
)
def test_chat_shows_the_servers_error(message: str, error: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", url, "-q", message]) == 1
    err = capsys.readouterr().err
    assert err.startswith("halfbyte: error: ") and err.endswith(f"{error}\n") and err.count("\n") == 1


def test_chat_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi"]) == 1
    err = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:9/v1" in err and "halfbyte serve" in err and err.count("\n") == 1

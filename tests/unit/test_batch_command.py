"""`halfbyte run-batch`: the application called by lines of a file, the two files, and what ends a run.

The application is the server's own, around an engine whose answers are released by hand, so that nothing depends on time.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import APIRoute

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints import cli, launch
from halfbyte.entrypoints.batch import URLS, Line, LineReader
from halfbyte.entrypoints.commands import run_batch
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, SERVER_FLAGS
from halfbyte.entrypoints.flags import parse
from halfbyte.entrypoints.server import build_app
from halfbyte.errors import EngineDeadError
from halfbyte.types import EngineInfo, EngineOutput, EngineRequest, SchedulerStats, StepOutput
from tests.unit.batch_files import Progress, line, written

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")


# --- through the application -------------------------------------------------------------------------------------------


class HeldClient:
    """An EngineClient whose requests each yield their first prompt token when the test lets them. `die` kills it.

    Works in the loop that made it, apart from `receive`.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int = 64, hold: bool = True) -> None:
        self.progress = Progress()
        self.live: dict[int, EngineRequest] = {}  # by the first token of the prompt
        self.most_live = 0
        self.num_added = 0
        self.closed = False
        self._hold = hold
        self._changed = threading.Condition()
        self._outputs: list[EngineOutput] = []
        self._dead: str | None = None
        numbers = {"vocab_size": vocab_size, "max_num_seqs": max_num_seqs}
        numbers |= {"max_model_len": 64, "max_num_batched_tokens": 512, "block_size": 16, "num_blocks": 100, "max_logprobs": 5}
        words = {"model": "held", "architecture": "Held", "dtype": "float32", "kv_cache_dtype": "float32"}
        others: dict[str, Any] = {"eos_token_ids": [vocab_size - 1], "max_concurrency": 1.0, "enable_prefix_caching": True}
        self.info = EngineInfo(**words, **numbers, **others, kv_cache_bytes=1, kv_cache_tokens=1)

    def add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            self.live[request.prompt_token_ids[0]] = request
            self.num_added += 1
            self.most_live = max(self.most_live, len(self.live))
            if not self._hold:
                self.finish(request.prompt_token_ids[0])
        self.progress.happened()

    def abort(self, request_ids: list[str]) -> None:
        self.live = {token: request for token, request in self.live.items() if request.request_id not in request_ids}
        self.progress.happened()

    def finish(self, *tokens: int) -> None:
        with self._changed:
            for token in tokens:
                request_id = self.live.pop(token).request_id
                self._outputs.append(EngineOutput(request_id=request_id, new_token_ids=[token], finish_reason="length"))
            self._changed.notify_all()

    def die(self, reason: str) -> None:
        with self._changed:
            self._dead = reason
            self._changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> StepOutput | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._outputs or self._dead is not None, timeout_s):
                return None
            if not self._outputs:
                raise EngineDeadError(str(self._dead))
            outputs, self._outputs = self._outputs, []
            return StepOutput(outputs=outputs, stats=SchedulerStats())

    def close(self) -> None:
        self.closed = True


class Run:
    """`answer_file` in a task, around a held engine."""

    def __init__(
        self, tokenizer: Tokenizer, texts: Iterable[bytes], max_open_lines: int | None, config: ServerConfig, **held: Any
    ):
        self.client = HeldClient(len(tokenizer), **held)
        self.until = self.client.progress.until
        self.engine = AsyncEngine(self.client, tokenizer)
        self.out = b""
        app = build_app(self.engine, config)
        self.urls = {route.path for route in app.routes if isinstance(route, APIRoute) and "POST" in route.methods}
        file = io.BytesIO(b"".join(texts))
        self.task = asyncio.create_task(run_batch.answer_file(self.engine, app, file, self._write, max_open_lines))
        self.task.add_done_callback(lambda _: self.client.progress.happened())

    def _write(self, data: bytes) -> None:
        self.out += data
        self.client.progress.happened()

    @property
    def statuses(self) -> list[tuple[str | None, int | None]]:
        """(custom_id, HTTP status or None) of each line written."""
        return [(answer["custom_id"], (answer["response"] or {}).get("status_code")) for answer in written(self.out)]

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.engine.close()


Start = Callable[..., Run]


@pytest.fixture
async def start(json_tokenizer: Tokenizer) -> AsyncIterator[Start]:
    runs: list[Run] = []

    def begin(texts: Iterable[bytes], max_open_lines: int | None = None, config: ServerConfig | None = None, **held: Any) -> Run:
        runs.append(Run(json_tokenizer, texts, max_open_lines, config or ServerConfig(), **held))
        return runs[-1]

    yield begin
    for run in runs:
        await run.close()


def prompt(number: int, **changes: Any) -> bytes:
    """A line that is answered when the request whose prompt begins with this token is finished."""
    return line(f"line-{number}", body={"prompt": [number, 1, 2], "max_tokens": 1} | changes)


async def test_a_batch_through_the_application(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [
        prompt(3),
        b"nothing\n",
        prompt(4),
        prompt(5, temperature=9),
        prompt(6, model="other"),
        b"\n",
        prompt(7, stream=True),
    ]
    run = start([*texts, prompt(8)])
    await run.until(lambda: set(run.client.live) == {3, 4, 8})
    run.client.finish(8, 4)
    await run.until(lambda: not run.out and set(run.client.live) == {3})
    run.client.finish(3)
    await run.task
    assert run.statuses == [
        ("line-3", 200),
        (None, None),
        ("line-4", 200),
        ("line-5", 400),
        ("line-6", 404),
        ("line-7", None),
        ("line-8", 200),
    ]
    answers = written(run.out)
    assert len({answer["id"] for answer in answers}) == len(answers)
    for answer in answers:
        response = answer["response"]
        if response is not None:
            assert answer["id"] == f"halfbyte-{response['request_id']}"
            assert answer["error"] == response["body"].get("error")
        if response is not None and response["status_code"] == 200:
            assert response["body"]["id"] == f"cmpl-{response['request_id']}"
            assert response["body"]["choices"][0]["finish_reason"] == "length"
    assert answers[3]["error"]["param"] == "temperature"
    assert re.fullmatch(r"7 lines in \d+\.\d s, 4 failed\n", capsys.readouterr().err)


@pytest.mark.parametrize(("max_num_seqs", "asked", "most"), [(4, 5, 5), (4, None, 32), (20, None, 40)])
async def test_lines_in_flight(start: Start, max_num_seqs: int, asked: int | None, most: int) -> None:
    tokens = range(3, 63)
    run = start(map(prompt, tokens), asked, max_num_seqs=max_num_seqs)
    for token in tokens:
        await run.until(lambda: run.client.num_added == min(token - 3 + most, len(tokens)))  # noqa: B023
        run.client.finish(token)
    await run.task
    assert run.client.most_live == most
    assert run.statuses == [(f"line-{token}", 200) for token in tokens]


async def test_the_servers_limits_hold(start: Start) -> None:
    config = ServerConfig(max_body_bytes=200, served_model_names=("mine",))
    run = start([prompt(3, model="mine"), prompt(4, user="x" * 300), prompt(5, model="held")], config=config, hold=False)
    await run.task
    assert run.statuses == [("line-3", 200), ("line-4", 413), ("line-5", 404)]


async def test_every_url_of_a_batch_is_a_post_route(start: Start) -> None:
    assert {url for url in URLS if "completions" in url} <= start([]).urls


async def test_the_engines_death_ends_the_run_behind_the_last_answer(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(map(prompt, range(3, 60)), 4)
    await run.until(lambda: len(run.client.live) == 4)
    run.client.finish(3, 5)  # 4 is not answered, so that 5 cannot be written
    await run.until(lambda: run.client.num_added == 6)
    assert [name for name, _ in run.statuses] == ["line-3"]
    run.client.die("out of memory")
    with pytest.raises(EngineDeadError, match=r"^out of memory; written until then: 1 line$"):
        await run.task
    assert run.statuses == [("line-3", 200)]
    assert capsys.readouterr().err.count("failed\n") == 0


async def test_the_engines_death_is_noticed_while_a_pipe_is_silent(json_tokenizer: Tokenizer) -> None:
    read_end, write_end = os.pipe()
    client = HeldClient(len(json_tokenizer), hold=False)
    engine = AsyncEngine(client, json_tokenizer)
    out: list[bytes] = []

    def write(data: bytes) -> None:
        out.append(data)
        client.die("killed")

    os.write(write_end, prompt(3))
    with pytest.raises(EngineDeadError, match="killed; written until then: 1 line"):
        await run_batch.answer_file(engine, build_app(engine, ServerConfig()), os.fdopen(read_end, "rb"), write)
    assert len(out) == 1
    os.close(write_end)
    await engine.close()


async def test_an_interrupted_run_leaves_whole_lines(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(map(prompt, range(3, 9)))
    await run.until(lambda: len(run.client.live) == 6)
    run.client.finish(3, 4, 6)
    await run.until(lambda: len(run.statuses) == 2)
    run.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.task
    assert run.statuses == [("line-3", 200), ("line-4", 200)]
    assert capsys.readouterr().err == "interrupted; written until then: 2 lines\n"
    await run.until(lambda: not run.client.live)


# --- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, json_tokenizer: Tokenizer) -> list[Any]:
    """The EngineOptions that engines were started with, and their clients. The engines answer at once."""
    started: list[Any] = []

    def start_engine(options: EngineOptions, server: ServerConfig) -> Any:
        client = HeldClient(len(json_tokenizer), hold=False)
        started.extend((options, client))
        front = SimpleNamespace(tokenizer=json_tokenizer, default_sampling={})
        return client, front, replace(server, served_model_names=("held",))

    monkeypatch.setattr(launch, "start_engine", start_engine)
    monkeypatch.setattr(launch, "model_temperatures", lambda front, server: None)
    monkeypatch.setattr(launch, "interrupt_on_sigterm", lambda: None)
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)
    return started


def test_the_command(
    starts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALFBYTE_API_KEY", "of the server")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(prompt(3) + line("b", method="GET"))
    words = ["run-batch", "-i", str(source), "-o", str(target), "--model", "m", "--max-num-seqs", "2"]
    assert cli.main(words) == 0
    options, client = starts
    assert options == EngineOptions(model="m", max_num_seqs=2, max_num_mixed_tokens=0) and client.closed
    assert [answer["custom_id"] for answer in written(target.read_bytes())] == ["line-3", "b"]
    err = capsys.readouterr().err
    assert re.fullmatch(r"2 lines in \d+\.\d s, 1 failed\n", err)
    before = target.read_bytes()
    assert cli.main(words) == 1
    assert capsys.readouterr().err == f"halfbyte: error: --output-file: '{target}' exists; --overwrite replaces it\n"
    assert target.read_bytes() == before and len(starts) == 2
    source.write_bytes(prompt(4))
    assert cli.main([*words, "--overwrite", "--max-num-mixed-tokens", "5"]) == 0
    assert [answer["custom_id"] for answer in written(target.read_bytes())] == ["line-4"]
    assert starts[2].max_num_mixed_tokens == 5


def test_standard_output(starts: list[Any], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(prompt(3) + prompt(4))
    assert cli.main(["run-batch", "--input-file", str(source), "--output-file", "-"]) == 0
    assert [answer["custom_id"] for answer in written(capsysbinary.readouterr().out)] == ["line-3", "line-4"]


def test_the_engines_death_is_exit_code_1(
    starts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(prompt(3) + prompt(4))

    def die(client: HeldClient, requests: list[EngineRequest]) -> None:
        client.die("signal 9")

    monkeypatch.setattr(HeldClient, "add", die)
    assert cli.main(["run-batch", "-i", str(source), "-o", str(target)]) == 1
    assert capsys.readouterr().err.endswith("halfbyte: error: signal 9; written until then: 0 lines\n")
    assert target.read_bytes() == b""


def test_a_disk_that_is_full(starts: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    source = tmp_path / "in.jsonl"
    source.write_bytes(prompt(3))
    assert cli.main(["run-batch", "-i", str(source), "-o", "/dev/full"]) == 1
    assert "--output-file: cannot write '/dev/full': No space left on device" in capsys.readouterr().err
    assert starts[1].closed


def test_the_input_is_never_the_output(starts: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, linked = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    source.write_bytes(prompt(3))
    linked.symlink_to(source)
    for target in (source, linked):
        assert cli.main(["run-batch", "-i", str(source), "-o", str(target), "--overwrite"]) == 1
        assert "is the input" in capsys.readouterr().err
    assert source.read_bytes() == prompt(3) and not starts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "run-batch needs two files: halfbyte run-batch -i "),
        (["-i", "-"], "run-batch needs two files"),
        (["-i", "https://a.b/in.jsonl", "-o", "-"], "--input-file: 'https://a.b/in.jsonl' is an address; name a file"),
        (["-i", "-", "-o", "HTTP://a.b/out"], "--output-file: 'HTTP://a.b/out' is an address; name a file"),
        (["-i", "-", "-o", "s3://a/b"], "--output-file: 's3://a/b' is an address; name a file"),
        (["-i", "/nowhere/in.jsonl", "-o", "-"], "--input-file: there is no '/nowhere/in.jsonl'"),
        (["-i", "/", "-o", "-"], "--input-file: '/' must be a file"),
        (["-i", "-", "-o", "/"], "--output-file: '/' must be a file"),
        (["-i", "-", "-o", ""], "--output-file: '' must be a file"),
        (["-i", "-", "-o", "/nowhere/out.jsonl"], "--output-file: '/nowhere/out.jsonl' must be in a folder that exists"),
        (["-i", "-", "-o", "-", "--max-concurrent-lines", "0"], "--max-concurrent-lines must be at least 1, got 0"),
        (["-i", "-", "-o", "-", "model"], "unrecognized arguments: model"),
        (["-i", "-", "-o", "-", "-tp", "2"], "-tp is not supported yet: this version runs on one device"),
        (["-i", "-", "-o", "-", "--output-tmp-dir", "x"], "--output-tmp-dir is not supported yet: answers are written to"),
        (["--max-num-queued-reqs", "1"], "--max-num-queued-reqs is not supported yet: lines wait for their turn"),
        (["--enable-force-include-usage"], "--enable-force-include-usage is not supported yet: answers are not streamed"),
    ],
)
def test_wrong_command_line(words: list[str], message: str, starts: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run-batch", *words]) == 2
    assert capsys.readouterr().err.startswith(f"halfbyte: error: {message}") and not starts


def test_every_flag_of_the_server_is_honoured_or_refused() -> None:
    honoured = {spelling for flag in run_batch.FLAGS for spelling in flag.spellings}
    assert len(honoured) == sum(len(flag.spellings) for flag in run_batch.FLAGS)
    assert not honoured & set(run_batch.REFUSED)
    assert {f"--{flag.name}" for flag in (*ENGINE_FLAGS, *SERVER_FLAGS)} <= honoured | set(run_batch.REFUSED)
    for name in ("--host", "--port", "--api-key", "--ssl-keyfile", "--allowed-hosts", "--root-path", "--shutdown-timeout"):
        assert run_batch.REFUSED[name] == "nothing listens here; leave it out"
    for name in (
        "--chat-template",
        "--tool-call-parser",
        "--override-generation-config",
        "--served-model-name",
        "--max-body-bytes",
    ):
        assert name in honoured


# --- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_command_has() -> None:
    section = PAGE[PAGE.index("## Batches from a file") :].split("\n## ")[0]
    own = [flag for flag in run_batch.FLAGS if flag.owner == "command" and flag.name != "log-level"]
    assert all(f"`--{flag.name}`" in section for flag in own)
    assert all(f"`{url}`" in section for url in URLS)
    [command] = re.findall(r"^halfbyte run-batch (.*)$", section, re.M)
    words = ["-" if word.endswith(".jsonl") else word for word in shlex.split(command)]
    parse("run-batch", "", run_batch.FLAGS, words, run_batch.REFUSED)
    lines = [text for text in section.splitlines() if text.startswith('{"custom_id"')]
    reader = LineReader()
    assert len(lines) >= 2 and all(isinstance(reader.read(i, text.encode()), Line) for i, text in enumerate(lines))

"""`halfbyte run-batch`: the application called by lines of a file, the two files, and what ends a run.

The application is the server's own, around an engine whose answers are released by hand, so that nothing depends on time.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import shlex
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from halfbyte.config import EngineOptions, ServerConfig
from halfbyte.engine.async_engine import AsyncEngine
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints import cli, launch
from halfbyte.entrypoints.batch import URLS, Line, LineReader
from halfbyte.entrypoints.batch_routes import OwnRoutes, answer_file
from halfbyte.entrypoints.commands import run_batch
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, SERVER_FLAGS
from halfbyte.entrypoints.flags import parse
from halfbyte.entrypoints.server import build_app
from halfbyte.errors import HalfbyteError
from halfbyte.types import EngineRequest
from tests.unit.batch_files import line, written
from tests.unit.held_engine import HeldClient, stand_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")


# --- through the application -------------------------------------------------------------------------------------------


class Run:
    """`answer_file` in a task, around a held engine."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[bytes], max_open_lines: int, config: ServerConfig, **held: Any):
        self.client = HeldClient(len(tokenizer), **held)
        self.until = self.client.progress.until
        self.engine = AsyncEngine(self.client, tokenizer)
        self.out = b""
        app = build_app(self.engine, config)
        self.urls = {route.path for route in app.routes if isinstance(route, APIRoute) and "POST" in route.methods}
        self.task = asyncio.create_task(self._run(app, io.BytesIO(b"".join(texts)), max_open_lines))
        self.task.add_done_callback(lambda _: self.client.progress.happened())

    async def _run(self, app: FastAPI, file: BinaryIO, max_open_lines: int) -> None:
        async with OwnRoutes.open(self.engine, app) as routes:
            await answer_file(routes, file, self._write, max_open_lines)

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

    def begin(texts: Iterable[bytes], max_open_lines: int = 8, config: ServerConfig | None = None, **held: Any) -> Run:
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
    run = start(map(prompt, tokens), run_batch.open_lines(asked, max_num_seqs), max_num_seqs=max_num_seqs)
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
    with pytest.raises(HalfbyteError, match=r"^out of memory; written until then: 1 line$"):
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
    async with OwnRoutes.open(engine, build_app(engine, ServerConfig())) as routes:
        with pytest.raises(HalfbyteError, match="killed; written until then: 1 line"):
            await answer_file(routes, os.fdopen(read_end, "rb"), write, 8)
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
    stand_in(monkeypatch.setattr, json_tokenizer, lambda: HeldClient(len(json_tokenizer), hold=False), started)
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
    assert cli.main(words) == 0
    assert capsys.readouterr().err == f"{target} has the answers already: 2 lines, 1 failed\n"
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
    said = "signal 9; written until then: 0 lines (out.jsonl.part); the same command goes on behind them\n"
    assert capsys.readouterr().err.endswith(f"halfbyte: error: {said}")
    assert list(tmp_path.iterdir()) == [source]


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
    on_its_way = tmp_path / "answers.part"
    on_its_way.write_bytes(prompt(3))
    assert cli.main(["run-batch", "-i", str(on_its_way), "-o", str(tmp_path / "answers"), "--overwrite"]) == 1
    assert "is the input" in capsys.readouterr().err
    assert source.read_bytes() == on_its_way.read_bytes() == prompt(3) and not starts


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
        (
            ["-i", "-", "-o", "-", "--output-tmp-dir", "x"],
            "--output-tmp-dir is not supported yet: answers that are not whole yet are in",
        ),
        (["-i", "-", "-o", "-", "--url", "http://[::1"], "--url: 'http://[::1' must be http:// or https:// and a host"),
        (["-i", "-", "-o", "-", "--url", "http://a:99999"], "--url: 'http://a:99999' must be http:// or https:// and a host"),
        (["-i", "-", "-o", "-", "--url", "http://a", "--api-key", "\u00e9"], "a server's key must be printable ASCII"),
        (["-i", "-", "-o", "-", "--api-key", "k"], "--api-key is for --url: nothing listens here"),
        (["-i", "-", "-o", "-", "--url", "localhost:8000"], "--url: 'localhost:8000' must be http:// or https:// and a host"),
        (
            ["-i", "-", "-o", "-", "--url", "http://a", "--model", "m"],
            "--model is the server's to set where --url lets one answer",
        ),
        (
            ["-i", "-", "-o", "-", "--url", "http://a", "--tool-call-parser", "hermes"],
            "--tool-call-parser is the server's to set",
        ),
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
    for name in ("--host", "--port", "--ssl-keyfile", "--allowed-hosts", "--root-path", "--shutdown-timeout"):
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
    assert len(lines) >= 2 and all(isinstance(reader.read(text.encode()), Line) for text in lines)

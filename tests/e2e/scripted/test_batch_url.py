"""`halfbyte run-batch --url` against a server with a key: its answers, in the order of the lines, and what its end leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfbyte.entrypoints import cli, launch

Server = Any
NUM_LINES = 60


@pytest.fixture(scope="module")
def server(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(api_keys=("k",))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(launch, "interrupt_on_sigterm", lambda: None)
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)
    monkeypatch.delenv("HALFBYTE_API_KEY", raising=False)
    source = tmp_path / "in.jsonl"
    bodies = [{"prompt": f"line {number}", "max_tokens": 3, "temperature": 0} for number in range(NUM_LINES)]
    bodies[7]["temperature"] = 9
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return source, tmp_path / "out.jsonl"


def run(files: tuple[Path, Path], url: str, *flags: str) -> int:
    source, target = files
    return cli.main(["run-batch", "-i", str(source), "-o", str(target), "--url", url, *flags])


def test_a_running_server_answers(server: Server, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files, f"{server.url}/v1", "--api-key", "k", "--max-concurrent-lines", "4") == 0
    answers = [json.loads(text) for text in files[1].read_text(encoding="utf-8").splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(NUM_LINES)]
    assert [answer["custom_id"] for answer in answers if answer["error"]] == ["7"]
    direct = server.http.post(
        "/v1/completions",
        json={"prompt": "line 3", "max_tokens": 3, "temperature": 0},
        headers={"authorization": "Bearer k"},
    )
    assert answers[3]["response"]["body"]["choices"] == direct.json()["choices"]
    assert f"{NUM_LINES} lines in " in capsys.readouterr().err


def test_a_wrong_key_ends_the_run_and_leaves_nothing(
    server: Server, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(files, server.url) == 1
    error = capsys.readouterr().err
    assert f"{server.url} answers 401: " in error and "name its key with --api-key; written until then: 0 lines" in error
    assert [path.name for path in files[0].parent.iterdir()] == ["in.jsonl"]

"""`halfbyte bench startup`: phases and the first token of a server that is a short script, and servers that go wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from halfbyte.entrypoints import cli
from halfbyte.entrypoints.bench import startup
from halfbyte.entrypoints.bench.results import Spread
from halfbyte.entrypoints.bench.startup import FIRST_TOKEN, measure, start_once
from halfbyte.errors import HalfbyteError

pytestmark = pytest.mark.usefixtures("bench_command")

# Prints as `halfbyte serve` does, answers each request with ANSWER, and serves until it is told to end.
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert b'"max_tokens":1' in body and self.path == "/v1/completions", (body, self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ANSWER)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print("some log line with 1.00 s in it", file=sys.stderr)
print("  load weights               1.25 s\\n  warm up                    0.50 s", file=sys.stderr)
print(f"ready: http://127.0.0.1:{server.server_address[1]}  (curl ...)", file=sys.stderr, flush=True)
server.serve_forever()
"""


def script(answer: str) -> list[str]:
    return [sys.executable, "-S", "-c", SERVER.replace("ANSWER", repr(answer.encode()))]


def ticking() -> Callable[[], float]:
    times = iter([10.0, 13.5])
    return lambda: next(times)


def test_one_start() -> None:
    seconds = start_once(script('{"choices": [{"text": " Paris"}]}'), clock=ticking())
    assert seconds == {"load weights": 1.25, "warm up": 0.5, FIRST_TOKEN: 3.5}
    assert list(seconds)[-1] == FIRST_TOKEN


def test_an_idle_server_is_watched() -> None:
    """The time is not waited for: what matters is that CPU time of the server and its children is counted over it."""
    waits: list[float] = []
    seconds = start_once(script('{"choices": [{"text": " Paris"}]}'), 50, wait=waits.append)
    assert seconds[startup.IDLE] == 0.0 and waits[-1] == 50


def test_cpu_time_of_a_process_and_its_children() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    child = f"{busy}\nprint(flush=True)\ninput()"
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-S', '-c', {child!r}])\ninput()"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert startup.cpu_s(parent.pid) >= 0.25  # of 0.3 s, counted in ticks of 10 ms, user and system apart
        assert startup.cpu_s(os.getpid()) >= startup.cpu_s(parent.pid)
        parent.communicate(b"")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"choices": [{"text": ""}]}', "the server started and its first token is empty"),
        ('{"choices": []}', "the server started and gave no token: IndexError"),
        ("no json", "the server started and gave no token: JSONDecodeError"),
    ],
)
def test_a_server_without_a_token(answer: str, message: str) -> None:
    with pytest.raises(HalfbyteError, match=message):
        start_once(script(answer))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('halfbyte: error: x.gguf does not exist')", "the server did not start: x.gguf does not exist"),
        ("", "the server did not start: it said nothing"),
    ],
)
def test_a_server_that_does_not_start(code: str, message: str) -> None:
    with pytest.raises(HalfbyteError) as caught:
        start_once([sys.executable, "-S", "-c", code])
    assert str(caught.value) == message


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Each start's engine flags, as the server would read them; the n-th start takes n seconds."""
    seen: list[dict[str, Any]] = []

    def start(command: list[str], idle_s: float = 0) -> dict[str, float]:
        assert command[:-2] == list(startup._SERVE) and command[-2] == "--config"
        seen.append(yaml.safe_load(Path(command[-1]).read_text()))
        return {"warm up": 0.5, FIRST_TOKEN: float(len(seen))} | ({startup.IDLE: len(seen) / 1000} if idle_s else {})

    monkeypatch.setattr(startup, "start_once", start)
    return seen


def test_warm_ups_do_not_count(starts: list[dict[str, Any]]) -> None:
    phases = measure({}, num_iters=3, num_iters_warmup=2)
    assert len(starts) == 5
    assert phases == {"warm up": Spread(0.5, 0.5, 0.5), FIRST_TOKEN: Spread(4.0, 3.0, 5.0)}


def test_command(starts: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = [
        "bench",
        "startup",
        "m",
        "--num-iters",
        "2",
        "--max-model-len",
        "auto",
        "--no-enable-prefix-caching",
        "--dtype",
        "float",
    ]
    assert cli.main([*words, "--hf-overrides", '{"rope_theta": 1e4}', "--output-json", str(path)]) == 0
    flags = {
        "model": "m",
        "max-model-len": -1,
        "enable-prefix-caching": False,
        "dtype": "float",
        "hf-overrides": {"rope_theta": 1e4},
    }
    assert starts == [flags] * 3
    out = capsys.readouterr().out
    assert out.startswith("m: 2 starts\nwarm up ") and "2.50 (from 2.00 to 3.00) s\n" in out
    document = json.loads(path.read_text())
    assert document["phases"][FIRST_TOKEN] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert "idle                     0.2% of a core (from 0.2% to 0.3%)\n" in out
    assert (document["idle_s"], document["idle_share_of_a_core"]["min"]) == (2, 0.002)
    assert (document["unit"], document["num_iters"], document["num_iters_warmup"]) == ("s", 2, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["--port", "1"], "unknown flag --port"),
        (["-tp", "2"], "-tp is not supported yet: this version runs on one device"),
    ],
)
def test_wrong_flags(words: list[str], message: str, starts: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "startup", *words]) == 2
    assert capsys.readouterr().err.startswith(f"halfbyte: error: {message}") and not starts

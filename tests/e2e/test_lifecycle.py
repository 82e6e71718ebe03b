"""How the server starts, dies and stops: a taken port, a wrong model, a killed or frozen engine, SIGTERM under load."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "128M")
ENDLESS: dict[str, Any] = {"model": "smollm2-135m", "prompt": "Count:", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}


def run_serve(*flags: str, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "halfbyte", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=limit_s, check=False)


def open_stream(client: openai.OpenAI) -> Any:
    """An endless greedy stream, of which the first token has arrived."""
    stream = client.completions.create(**ENDLESS, stream=True)
    next(iter(stream))
    return stream


def test_taken_port_fails_before_the_model_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        started = time.monotonic()
        result = run_serve("--port", str(taken.getsockname()[1]))
        assert result.returncode == 1
        assert "--port" in result.stderr and "Traceback" not in result.stderr
        assert "load weights" not in result.stderr
        assert time.monotonic() - started < 10  # 2 s on a quiet machine; the bound here only tells it from loading a model


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (("--model", "no-such-model"), ["no-such-model"]),
        (("--kv-cache-dtype", "fp8_ds_mla"), ["fp8_ds_mla", "MLA", "--kv-cache-dtype"]),
        (("--max-model-len", "100000"), ["100000", "8192", "--max-model-len"]),
        (("--kv-cache-memory-bytes", "1M"), ["--kv-cache-memory-bytes", "--max-model-len"]),
    ],
)
def test_wrong_start_is_one_line(flags: tuple[str, ...], names: list[str]) -> None:
    result = run_serve("--port", "0", *flags)
    assert result.returncode in (1, 2)
    errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and "Traceback" not in result.stderr
    for name in names:
        assert name in errors[0]


@pytest.mark.parametrize("kill_signal", [signal.SIGKILL, signal.SIGSTOP])
def test_checklist_15_engine_death_ends_streams_and_server(
    start_server: Callable[..., Any], wait_until: Any, kill_signal: signal.Signals
) -> None:
    server = start_server(*SMALL).ready()
    stream = open_stream(server.client())
    engine = server.engine_pid()
    os.kill(engine, kill_signal)
    try:
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        wait_until(lambda: server.process.poll() is not None, limit_s=30)
        assert server.process.returncode not in (0, None)
        wait_until(lambda: not Path(f"/proc/{engine}").exists() or "Z" in Path(f"/proc/{engine}/stat").read_text().split()[2])
    finally:
        if Path(f"/proc/{engine}").exists():
            os.kill(engine, signal.SIGKILL)


def test_engine_ends_with_its_parent(start_server: Callable[..., Any], wait_until: Any) -> None:
    server = start_server(*SMALL).ready()
    engine = server.engine_pid()
    server.process.kill()
    wait_until(lambda: not Path(f"/proc/{engine}").exists() or "Z" in Path(f"/proc/{engine}/stat").read_text().split()[2])


def test_sigterm_aborts_open_requests_with_an_answer(start_server: Callable[..., Any]) -> None:
    server = start_server(*SMALL).ready()
    client = server.client(timeout=60)
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(client.completions.create(**ENDLESS))
        except openai.APIError as error:
            answers.append(error)

    stream = open_stream(client)
    asking = threading.Thread(target=ask)
    asking.start()
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    asking.join(30)
    assert len(answers) == 1 and isinstance(answers[0], openai.APIError)
    assert server.process.wait(30) == 0


def test_sigterm_drains_within_the_timeout(start_server: Callable[..., Any]) -> None:
    server = start_server(*SMALL, "--shutdown-timeout", "60").ready()
    client = server.client(timeout=60)
    stream = client.completions.create(
        model="smollm2-135m", prompt="Count:", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(iter(stream))]
    server.process.send_signal(signal.SIGTERM)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.process.wait(30) == 0
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/health")

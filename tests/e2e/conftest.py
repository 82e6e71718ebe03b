"""Real server processes for the end-to-end tests: started through the command line, read through their own log."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 90.0


class ServerProcess:
    """`halfbyte serve` on a free port. `lines` is what it has printed; `url` is known once it says that it listens."""

    def __init__(self, *flags: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "halfbyte", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._news.put(line)
        self._news.put(None)

    def wait_for_line(self, pattern: str, limit_s: float = START_LIMIT_S) -> re.Match[str]:
        """Wait until a line matches; fail with the whole log when the process ends or the time is over first."""
        deadline = time.monotonic() + limit_s
        seen = 0
        while True:
            for line in self.lines[seen:]:
                seen += 1
                if match := re.search(pattern, line):
                    return match
            try:
                ended = self._news.get(timeout=max(0.0, deadline - time.monotonic())) is None
            except queue.Empty:
                ended = True
            if ended and seen >= len(self.lines):
                raise AssertionError(f"no line matched {pattern!r}; the server printed:\n" + "\n".join(self.lines))

    def ready(self) -> ServerProcess:
        self.url = self.wait_for_line(r"ready: (http://\S+)").group(1)
        self.wait_for_line("try: curl ")
        return self

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **({"api_key": "unused", "max_retries": 0} | options))  # type: ignore[arg-type]

    def metric(self, name: str) -> float:
        """The value of one metric without labels of its own, summed over its series."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
        assert found, f"{name} is not in /metrics"
        return sum(map(float, found))

    def engine_pid(self) -> int:
        """The child that runs the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            if "halfbyte.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes().decode():
                return int(pid)
        raise AssertionError(f"no engine among the children {children}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


def process_tree(pid: int) -> Iterator[int]:
    """A process and all that it started."""
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from process_tree(int(child))


def memory_bytes(pid: int) -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) * 1024


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Poll until the condition holds; an assertion when it does not in time."""
    deadline = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        pause.wait(0.02)


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers with given flags; all are stopped at the end."""
    started: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        started.append(ServerProcess(*flags))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def embedding_server(start_server: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A tiny encoder that makes embeddings."""
    from tests.pooling_checkpoints import make_encoder, write_modules

    folder = make_encoder(tmp_path_factory.mktemp("embedder"), "Bert")
    write_modules(folder, "mean_tokens", normalize=True)
    flags = ("--hf-overrides", '{"is_matryoshka": true}', "--served-model-name", "bge-small-en-v1.5")
    return start_server(str(folder), *flags).ready()


@pytest.fixture(scope="session")
def reranking_server(start_server: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    """A tiny cross-encoder with one label."""
    from tests.pooling_checkpoints import make_encoder

    folder = make_encoder(tmp_path_factory.mktemp("reranker"), "XLMRoberta", labels=1, max_position_embeddings=130)
    return start_server(str(folder), "--served-model-name", "bge-reranker-base").ready()


@pytest.fixture(scope="session")
def demo_server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """The demo model with default settings, as a newcomer has it."""
    return start_server().ready()


@pytest.fixture(scope="session")
def admin_server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """The same with room for adapters and the routes of operators, whose key is that of docs/api.md."""
    return start_server("--enable-admin", "--admin-api-key", "ADMIN_KEY", "--enable-lora").ready()

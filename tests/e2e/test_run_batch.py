"""`halfbyte run-batch` with the demo model: the page's example among good and bad lines, a pipe, a killed engine, SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", "64M")
LIMIT_S = 90.0
PREDICATE = {"type": "predicate", "instructions": "It is wet."}
DECISION = {"model": "", "input": "It rains.", "questions": [PREDICATE]}


def documented_lines() -> list[str]:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    section = page[page.index("## Batches from a file") :]
    return [text for text in section.splitlines() if text.startswith('{"custom_id"')]


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"temperature": 0} | body})


def completion(custom_id: str, prompt: str, max_tokens: int = 8, **body: Any) -> str:
    return line(custom_id, "/v1/completions", prompt=prompt, max_tokens=max_tokens, **body)


def chat(custom_id: str, content: str, max_tokens: int = 16) -> str:
    return line(custom_id, "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=max_tokens)


def start(*flags: str, **pipes: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HALFBYTE_API_KEY": "a server's"}
    command = [sys.executable, "-m", "halfbyte", "run-batch", *SMALL, *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, cwd=ROOT, **pipes)


def test_a_file_of_requests(tmp_path: Path) -> None:
    source, target = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    lines = [
        *documented_lines(),
        chat("long", "Tell me a story.", max_tokens=40),
        "this is no JSON",
        *(completion(f"count-{number}", f"{number}, {number + 1}, {number + 2},") for number in range(5)),
        "",
        completion("hot", "x", temperature=7),
        completion("paris", "The capital of France is", n=2, temperature=1, seed=3),
        chat("france again", "What is the capital of France?"),
        line("judge", "/v1/systemone", state="It rains.", questions={"wet": {"type": "noul", "instructions": "Is it wet?"}}),
        line("open judge", "/v1/decisions", model="", input="It rains.", questions=[PREDICATE], temperature=0),
        json.dumps({"custom_id": "decide", "method": "POST", "url": "/v1/decisions", "body": DECISION}),
    ]
    source.write_text("\n".join(lines), encoding="utf-8")
    run = start("-i", str(source), "-o", str(target), "--max-concurrent-lines", "5")
    _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, err.decode()
    assert re.search(r"^15 lines in \d+\.\d s, 3 failed$", err.decode(), re.M)
    answers = [json.loads(text) for text in target.read_text(encoding="utf-8").splitlines()]
    ids = [answer["custom_id"] for answer in answers]
    assert ids == ["france", "water", "long", None, *(f"count-{n}" for n in range(5)), "hot", "paris", "france again"] + [
        *("judge", "open judge", "decide")
    ]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert "line 4 is not a JSON object" in by_id[None]["error"]["message"] and by_id[None]["response"] is None
    assert by_id["hot"]["response"]["status_code"] == 400
    assert by_id["hot"]["error"] == by_id["hot"]["response"]["body"]["error"]
    bodies = {name: answer["response"]["body"] for name, answer in by_id.items() if answer["error"] is None}
    assert len(bodies) == 12
    assert by_id["open judge"]["response"]["status_code"] == 400, "/v1/decisions takes no temperature"
    assert 0 < bodies["judge"]["answers"]["wet"]["noul"] < 1 and 0 < bodies.pop("decide")["answers"][0]["probability"] < 1
    assert "Paris" in bodies["france"]["choices"][0]["message"]["content"]
    assert bodies["france again"]["choices"] == bodies["france"]["choices"]
    assert bodies["long"]["usage"]["completion_tokens"] == 40
    assert len(bodies["paris"]["choices"]) == 2
    assert bodies["count-1"]["choices"][0]["text"].startswith(" 4")
    for answer in answers:
        if answer["custom_id"] in bodies:
            request_id = answer["response"]["request_id"]
            assert answer["id"] == f"halfbyte-{request_id}" and answer["response"]["body"]["id"].endswith(f"-{request_id}")


class Piped:
    """A run that reads and writes pipes, of which one line has been answered; the input stays open."""

    def __init__(self) -> None:
        self.run = start("-i", "-", "-o", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.run.stdin is not None and self.run.stdout is not None and self.run.stderr is not None
        self.stdin, self.stdout, self.stderr = self.run.stdin, self.run.stdout, self.run.stderr
        self.err = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.stdin.write(completion("first", "Water boils at").encode() + b"\n")
        self.stdin.flush()
        answer = json.loads(self.stdout.readline())
        assert (answer["custom_id"], answer["error"]) == ("first", None)

    def _read(self) -> None:
        self.err = self.stderr.read()

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.run.pid}/task/{self.run.pid}/children").read_text().split()
        [pid] = [int(pid) for pid in children if b"halfbyte.engine.process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return pid

    def end(self) -> tuple[int, str, bytes]:
        """(exit code, what it said, what else it wrote), without an end of its input."""
        code = self.run.wait(LIMIT_S)
        self._reader.join()
        return code, self.err.decode(), self.stdout.read()

    def close(self) -> None:
        if self.run.poll() is None:
            self.run.kill()
            self.run.wait()
        self._reader.join()
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()


@pytest.fixture
def piped() -> Iterator[Piped]:
    run = Piped()
    yield run
    run.close()


def test_a_killed_engine_ends_a_run_that_waits_for_its_input(piped: Piped) -> None:
    os.kill(piped.engine_pid(), signal.SIGKILL)
    code, err, out = piped.end()
    assert (code, out) == (1, b"")
    assert err.splitlines()[-1].startswith("halfbyte: error: the engine process ended unexpectedly (signal 9)")
    assert err.splitlines()[-1].endswith("; written until then: 1 line")


def test_sigterm_ends_a_run_behind_a_whole_line(piped: Piped) -> None:
    engine = piped.engine_pid()
    piped.stdin.write(completion("endless", "Count:", 480, ignore_eos=True).encode() + b"\n")
    piped.stdin.flush()
    piped.run.send_signal(signal.SIGTERM)
    code, err, out = piped.end()
    assert (code, out) == (130, b"")
    assert "Traceback" not in err and "interrupted; written until then: 1 line" in err
    assert not Path(f"/proc/{engine}").exists()

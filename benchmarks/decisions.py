"""One state and eight questions: a decision beside eight chat requests of one token, on a running server of this checkout.

Starts `halfbyte serve`, asks about states that nobody asked about before (cold) and again (warm), interleaved in one run, and
prints one JSON: seconds, tokens that were computed by the server's own counters, ratios with their spread. The limit is one chat
request with a prompt of as many tokens as the decision computes. `unshared` is a second server without prefix caching. Usage:

    python benchmarks/decisions.py [--model M] [--reps 7] [--state-tokens 400] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from halfbyte.entrypoints.decisions.questions import read_questions
from halfbyte.entrypoints.decisions.wording import question_text

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("order", "parcel", "broken", "late", "money", "twice", "please", "refund", "colour", "box", "street", "week", "stone")
TOPICS = ("a refund", "a parcel", "a colour", "a street", "a letter", "a window", "money", "paper")
OWN_WORDS = 170
COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"


class Served:
    """A server process on a free port."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "halfbyte", "serve", model, "--port", "0", "--max-model-len", "2048"]
        command += ["--disable-uvicorn-access-log", *flags]  # nobody reads on
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready: (http://\S+)", line):
                self.url = found.group(1)
                return
        raise SystemExit("the server did not start")

    def computed_tokens(self) -> float:
        found = re.search(rf"^{COMPUTED}\S* (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M)
        assert found
        return float(found.group(1))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def questions() -> dict[str, Any]:
    return {f"q{i}": {"type": "noul", "instructions": f"Is this about {topic}?"} for i, topic in enumerate(TOPICS)}


async def decide(http: httpx.AsyncClient, state: str) -> None:
    (await http.post("/v1/systemone", json={"state": state, "questions": questions()})).raise_for_status()


async def chats(http: httpx.AsyncClient, state: str, *, at_once: bool) -> None:
    """The same questions as conversations, whose first token's log probabilities are returned."""
    calls = []
    for question in read_questions(questions()):
        text = f"{state}\n\n{question_text(question, (0, 1))}"
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
        calls.append(http.post("/v1/chat/completions", json=body))
    if at_once:
        for answer in await asyncio.gather(*calls):
            answer.raise_for_status()
    else:
        for call in calls:
            (await call).raise_for_status()


async def one_chat(http: httpx.AsyncClient, state: str) -> None:
    """A prompt of about as many tokens as a cold decision computes: the state, and eight questions' own."""
    text = f"{state} {' '.join(state.split()[:OWN_WORDS])}"
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
    (await http.post("/v1/chat/completions", json=body)).raise_for_status()


async def measure(served: Served, unshared: Served, reps: int, num_words: int) -> dict[str, Any]:
    ways: dict[str, tuple[Served, Callable[[httpx.AsyncClient, str], Awaitable[None]]]] = {
        "decision": (served, decide),
        "limit": (served, one_chat),
        "chats_at_once": (served, lambda http, state: chats(http, state, at_once=True)),
        "chats_one_by_one": (served, lambda http, state: chats(http, state, at_once=False)),
        "unshared_chats_at_once": (unshared, lambda http, state: chats(http, state, at_once=True)),
    }
    seconds: dict[str, list[float]] = {f"{name}_{when}": [] for name in ways for when in ("cold", "warm")}
    tokens: dict[str, list[float]] = {name: [] for name in seconds}
    draw = random.Random(0)
    # connections are given up before the server closes them, after 5 s
    options: dict[str, Any] = {"timeout": 120, "limits": httpx.Limits(keepalive_expiry=2.0)}
    for rep in range(reps + 1):  # the first is warm-up
        for name in sorted(ways, key=lambda _: draw.random()):
            server, ask = ways[name]
            state = " ".join(draw.choice(WORDS) for _ in range(num_words))
            async with httpx.AsyncClient(base_url=server.url, **options) as http:
                for when in ("cold", "warm"):
                    before, started = server.computed_tokens(), time.perf_counter()
                    await ask(http, state)
                    took = time.perf_counter() - started
                    if rep:
                        seconds[f"{name}_{when}"].append(took)
                        tokens[f"{name}_{when}"].append(server.computed_tokens() - before)
    return {"seconds": seconds, "computed_tokens": tokens}


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--state-tokens", type=int, default=400, help="words of the state, which are about as many tokens")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    servers = [Served(given.model), Served(given.model, "--no-enable-prefix-caching")]
    try:
        found = asyncio.run(measure(*servers, given.reps, given.state_tokens))
    finally:
        for server in servers:
            server.stop()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    ratios = {
        f"{name} / decision, {when}": summary(
            [a / b for a, b in zip(found["seconds"][f"{name}_{when}"], found["seconds"][f"decision_{when}"], strict=True)]
        )
        for name in ("limit", "chats_at_once", "chats_one_by_one", "unshared_chats_at_once")
        for when in ("cold", "warm")
    }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown'}",
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "warm_up": 1,
        "reps": given.reps,
        "seconds": {name: summary(values) for name, values in found["seconds"].items()},
        "computed_tokens": {name: summary(values) for name, values in found["computed_tokens"].items()},
        "ratios": ratios,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What the API process costs: its CPU per streamed token and per 1000 prompt tokens, and what it keeps the engine waiting.

    python benchmarks/api_overhead.py [--streams 128] [--tokens 64] [--step-ms 10] [--reps 5] [--out result.json]

A real server process with a real tokenizer, template and engine process; only the device is a stub that takes `--step-ms` per
step (`stub_engine.py`). Three things are measured, in turns:
  tokens   N streams at once: CPU of the API process per token, and the share of the time that the device is busy
  prompts  long chat prompts with one token of answer: CPU per 1000 prompt tokens
  stall    one stream runs while long conversations arrive: the longest time between two of its chunks
The load generator runs on the same cores and takes its share of them: on a small machine the busy share is a lower bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from halfbyte.entrypoints.bench.results import Spread, environment, save  # noqa: E402

CHAT, MODEL = "/v1/chat/completions", "smollm2-135m"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "seven", "small", "birds", "in", "an", "old", "tree")


def serve(step_s: float, result: str, ahead: bool) -> int:
    """The server's own process."""
    from halfbyte.config import EngineOptions, ServerConfig
    from halfbyte.engine.client import ProcessClient
    from halfbyte.entrypoints import launch
    from halfbyte.log import setup_logging

    class StubClient(ProcessClient):
        PROGRAM = (str(ROOT / "benchmarks" / "stub_engine.py"), str(step_s), result)

    setup_logging("info")
    launch.ProcessClient = StubClient  # type: ignore[misc]
    options = EngineOptions(
        model=MODEL, max_num_seqs=256, max_num_batched_tokens=8192, max_num_mixed_tokens=0, async_scheduling=ahead
    )
    return launch.serve(options, ServerConfig(port=0, disable_uvicorn_access_log=True))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def prompt(num_words: int, salt: int) -> list[dict[str, str]]:
    text = " ".join(WORDS[(i * 7 + salt) % len(WORDS)] for i in range(num_words))
    return [{"role": "user", "content": f"{salt} {text}"}]


async def stream(session: aiohttp.ClientSession, messages: list[dict[str, str]], num_tokens: int) -> list[float]:
    """When each chunk with text came."""
    body = {"messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    arrived = []
    async with session.post(CHAT, json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {") and b'"content":"' in line and b'"role"' not in line:
                arrived.append(time.monotonic())
    return arrived


async def tokens_case(session: aiohttp.ClientSession, pid: int, args: argparse.Namespace) -> dict[str, float]:
    started_cpu_s, started_s = cpu_s(pid), time.monotonic()
    arrived = await asyncio.gather(*(stream(session, prompt(20, i), args.tokens) for i in range(args.streams)))
    used_s, ended_s = cpu_s(pid) - started_cpu_s, time.monotonic()
    num_tokens = args.streams * args.tokens
    assert sum(map(len, arrived)) == num_tokens, "a chunk per token"
    return {
        "cpu_us_per_token": used_s / num_tokens * 1e6,
        "tokens_per_s": num_tokens / (ended_s - started_s),
        "started_s": started_s,
        "ended_s": ended_s,
    }


async def prompts_case(session: aiohttp.ClientSession, pid: int, args: argparse.Namespace, salt: int) -> dict[str, float]:
    started_cpu_s, num_tokens = cpu_s(pid), 0
    for i in range(8):
        body = {"messages": prompt(4000, salt * 8 + i), "max_tokens": 1}
        async with session.post(CHAT, json=body) as answer:
            num_tokens += (await answer.json())["usage"]["prompt_tokens"]
    return {"cpu_ms_per_1k_prompt_tokens": (cpu_s(pid) - started_cpu_s) / num_tokens * 1e6}


async def stall_case(session: aiohttp.ClientSession, args: argparse.Namespace, salt: int) -> dict[str, float]:
    running = asyncio.create_task(stream(session, prompt(20, salt), 300))
    await asyncio.sleep(20 * args.step_ms / 1e3)
    long = [[{"role": "user", "content": prompt(6, i + salt)[0]["content"]}] * 999 + prompt(20_000, salt + i) for i in range(4)]

    async def refuse_or_answer(messages: list[dict[str, str]]) -> int:
        async with session.post(CHAT, json={"messages": messages, "max_tokens": 1}) as answer:
            await answer.read()
            return answer.status

    statuses = await asyncio.gather(*(refuse_or_answer(messages) for messages in long))
    arrived = await running
    gaps = [b - a for a, b in zip(arrived, arrived[1:], strict=False)]
    assert set(statuses) <= {200, 400}, statuses
    return {"largest_gap_ms": max(gaps) * 1e3, "step_ms": args.step_ms}


def device_share(busy: list[list[float]], run: dict[str, float]) -> dict[str, float]:
    """Of the time from the first to the last step of a run: how much the device worked, and how many streams its steps had."""
    steps = [step for step in busy if run["started_s"] <= step[0] and step[1] <= run["ended_s"]]
    worked_s = sum(end - start for start, end, _ in steps)
    share = worked_s / (steps[-1][1] - steps[0][0])
    return {"device_busy_percent": 100 * share, "streams_per_step": sum(step[2] for step in steps) / len(steps)}


async def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {"tokens": [], "prompts": [], "stall": []}
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        await tokens_case(session, pid, argparse.Namespace(streams=4, tokens=8))
        for rep in range(args.reps):
            found["tokens"].append(await tokens_case(session, pid, args))
            found["prompts"].append(await prompts_case(session, pid, args, rep))
            found["stall"].append(await stall_case(session, args, rep))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--no-step-ahead", action="store_true", help="schedule a step only when the one before it is done")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(float(args.serve[0]), args.serve[1], args.serve[2] == "ahead")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "busy.json"
        command = [
            sys.executable,
            __file__,
            "--serve",
            str(args.step_ms / 1e3),
            str(result),
            "" if args.no_step_ahead else "ahead",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert server.stdout is not None
            lines = []
            for line in server.stdout:
                lines.append(line)
                if match := re.search(r"ready: (http://\S+)", line):
                    break
            else:
                raise SystemExit("the server did not start:\n" + "".join(lines))
            found = asyncio.run(measure(match.group(1), server.pid, args))
        finally:
            server.terminate()
            print(*server.communicate(timeout=30)[0].splitlines()[-20:], sep="\n", file=sys.stderr)
        busy = json.loads(result.read_text())
    for run in found["tokens"]:
        run |= device_share(busy, run)
        del run["started_s"], run["ended_s"]
    for case, runs in found.items():
        for name in runs[0]:
            print(f"{case}.{name:40} {Spread.of([run[name] for run in runs])}")
    if args.out:
        save(args.out, {**environment(), "settings": vars(args), "cases": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())

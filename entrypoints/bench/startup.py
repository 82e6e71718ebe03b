"""`halfbyte bench startup`: seconds from the command `halfbyte serve` to its first token, phase by phase, and what it takes idle.

Starts a server on a free port, asks for one token as soon as it says that it is ready, watches it do nothing, stops it, and
again. The phases are those that the server prints. Knows the server only from outside: its output, its address, one route, its
CPU time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import yaml

from halfbyte.entrypoints.bench.results import Spread, environment, save
from halfbyte.entrypoints.bench.shared_flags import MODEL, OUTPUT_JSON, count_flag, range_check
from halfbyte.entrypoints.flag_table import ENGINE_FLAGS, LOG_LEVEL, REFUSED_FLAGS, engine_options
from halfbyte.entrypoints.flags import Flag, parse
from halfbyte.errors import HalfbyteError

DEFAULT_NUM_ITERS, DEFAULT_NUM_ITERS_WARMUP, DEFAULT_IDLE_S = 5, 1, 2
FLAGS = (
    MODEL,
    count_flag("num-iters", "starts that are measured", DEFAULT_NUM_ITERS),
    count_flag("num-iters-warmup", "starts before that; the first one fills the file cache", DEFAULT_NUM_ITERS_WARMUP, least=0),
    Flag(
        name="idle-s",
        help=f"how long each server is watched idle after its token, in seconds; 0: not (default: {DEFAULT_IDLE_S})",
        kind="integer",
        check=range_check("idle-s", 0, 3600),
    ),
    OUTPUT_JSON,
    LOG_LEVEL,
    *ENGINE_FLAGS,
)
FIRST_TOKEN, IDLE = "first token", "idle"
_SERVE = (sys.executable, "-m", "halfbyte", "serve", "--port", "0", "--log-level", "info")
_PHASE = re.compile(r"  (\S.*?)\s+(\d+\.\d+) s")
_READY = re.compile(r"ready: (http\S+)")
_STOP_LIMIT_S = 30.0
_SETTLE_S = 2.0  # until what a start leaves behind is done


def run(argv: Sequence[str]) -> int:
    parsed = parse("bench startup", "Measure the start of a server, up to its first token.", FLAGS, argv, REFUSED_FLAGS)
    options = engine_options(parsed)
    num_iters = parsed.command.get("num_iters", DEFAULT_NUM_ITERS)
    num_iters_warmup = parsed.command.get("num_iters_warmup", DEFAULT_NUM_ITERS_WARMUP)
    print(f"{options.model}: {num_iters} starts", flush=True)
    idle_s = parsed.command.get("idle_s", DEFAULT_IDLE_S)
    phases = measure(parsed.engine, num_iters, num_iters_warmup, idle_s)
    idle = phases.pop(IDLE, None)
    for name, spread in phases.items():
        print(f"{name:<24} {spread} s", flush=True)
    if idle is not None:
        print(f"{IDLE:<24} {idle.median:.1%} of a core (from {idle.min:.1%} to {idle.max:.1%})", flush=True)
    if "output_json" in parsed.command:
        document = {"model": options.model, "num_iters": num_iters, "num_iters_warmup": num_iters_warmup}
        document |= {"phases": {name: asdict(spread) for name, spread in phases.items()}, "unit": "s"}
        document |= {} if idle is None else {"idle_s": idle_s, "idle_share_of_a_core": asdict(idle)}
        save(parsed.command["output_json"], document | {"environment": environment()})
    return 0


def measure(engine: Mapping[str, Any], num_iters: int, num_iters_warmup: int, idle_s: float = 0) -> dict[str, Spread]:
    """Each phase over the starts that count, in the order of the server's output; FIRST_TOKEN is the whole, IDLE a share."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:  # readable by its owner alone: it may hold a token
        yaml.safe_dump({flag.name: engine[flag.target] for flag in ENGINE_FLAGS if flag.target in engine}, config)
        config.flush()
        command = [*_SERVE, "--config", config.name]
        for _ in range(num_iters_warmup):
            start_once(command)
        starts = [start_once(command, idle_s) for _ in range(num_iters)]
    return {name: Spread.of([start[name] for start in starts]) for name in starts[0]}


def start_once(
    command: Sequence[str],
    idle_s: float = 0,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> dict[str, float]:
    """Seconds per phase, and FIRST_TOKEN: from the command to the answer with one token. IDLE: share of a core, if asked for."""
    started_s = clock()
    seconds: dict[str, float] = {}
    last_line = ""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in map(str.rstrip, server.stderr):
                last_line = line or last_line
                if (phase := _PHASE.fullmatch(line)) is not None:
                    seconds[phase.group(1)] = float(phase.group(2))
                elif (ready := _READY.match(line)) is not None:
                    _ask_for_a_token(ready.group(1))
                    seconds[FIRST_TOKEN] = clock() - started_s
                    return seconds | (_watch(server.pid, idle_s, wait) if idle_s else {})
        finally:
            _stop(server)
    raise HalfbyteError(f"the server did not start: {last_line.removeprefix('halfbyte: error: ') or 'it said nothing'}")


def _ask_for_a_token(url: str) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=None, trust_env=False)
        text = answer.raise_for_status().json()["choices"][0]["text"]
    except (httpx.HTTPError, json.JSONDecodeError, LookupError, TypeError) as error:
        raise HalfbyteError(f"the server started and gave no token: {type(error).__name__}: {error}") from None
    if not text:
        raise HalfbyteError("the server started and its first token is empty")


def _watch(pid: int, idle_s: float, wait: Callable[[float], None]) -> dict[str, float]:
    wait(_SETTLE_S)
    before_s = cpu_s(pid)
    wait(idle_s)
    return {IDLE: (cpu_s(pid) - before_s) / idle_s}


def cpu_s(pid: int) -> float:
    """CPU time that a process and its descendants have taken, as /proc counts it."""
    fields: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
    ours, found = {pid}, 0
    while found < len(ours):
        found = len(ours)
        ours |= {child for child, values in fields.items() if int(values[1]) in ours}
    ticks = sum(int(fields[child][11]) + int(fields[child][12]) for child in ours if child in fields)
    return ticks / os.sysconf("SC_CLK_TCK")


def _stop(server: subprocess.Popen[str]) -> None:
    """End it as a user would, and read on: a server that cannot write does not end."""
    server.terminate()
    try:
        server.communicate(timeout=_STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        server.kill()

"""How long a server takes from its command to its first token, phase by phase.

    python benchmarks/start_up.py [--repeats 5] [--model smollm2-135m] [--flags "--dtype float32"]

Starts `halfbyte serve` on a free port, asks for one token as soon as it says that it is ready, stops it, and again. Prints one
JSON: median and range of each phase and of the whole, with the commit, the machine and the versions. The first run is a
warm-up and does not count (it fills the file cache).
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from halfbyte.entrypoints.commands.collect_env import report

ROOT = Path(__file__).resolve().parent.parent
PHASE = re.compile(r"^  (\S.*?)\s+(\d+\.\d+) s$")


def run_once(model: str, flags: list[str]) -> dict[str, float]:
    """Seconds per phase, and `first token`: from the command to the answer with one token."""
    started_s = time.monotonic()
    command = [sys.executable, "-m", "halfbyte", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stderr is not None
        seconds: dict[str, float] = {}
        lines = []
        for line in server.stderr:
            lines.append(line)
            if match := PHASE.match(line.rstrip()):
                seconds[match.group(1)] = float(match.group(2))
            if line.startswith("ready: "):
                ask_for_a_token(line.split()[1], model)
                seconds["first token"] = time.monotonic() - started_s
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(lines))
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
    return seconds


def ask_for_a_token(url: str, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["choices"][0]["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--flags", default="", help="further flags of serve, in one string")
    arguments = parser.parse_args()
    runs = [run_once(arguments.model, arguments.flags.split()) for _ in range(arguments.repeats + 1)][1:]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    result = {
        "benchmark": "start_up",
        "unit": "s",
        "commit": commit.stdout.strip(),
        "command": sys.argv,
        "warm_up_runs": 1,
        "repeats": arguments.repeats,
        "environment": dict(report()),
        "phases": {
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name in runs[0]
            for values in [[run[name] for run in runs]]
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

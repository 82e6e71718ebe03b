"""benchmarks/api_overhead.py in small: it runs, and says what it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_overhead_of_the_api_process_is_measured(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    size = ["--streams", "4", "--tokens", "8", "--step-ms", "5", "--reps", "1"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "api_overhead.py", *size, "--out", result],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cases = json.loads(result.read_text())["cases"]
    (tokens,), (prompts,), (stall,) = cases["tokens"], cases["prompts"], cases["stall"]
    assert tokens["tokens_per_s"] > 0 and 0 < tokens["device_busy_percent"] <= 101 and 1 <= tokens["streams_per_step"] <= 4
    assert prompts["cpu_ms_per_1k_prompt_tokens"] > 0 and stall["largest_gap_ms"] >= 1
    assert all(f"{case}.{name}" in done.stdout for case, (run,) in cases.items() for name in run)

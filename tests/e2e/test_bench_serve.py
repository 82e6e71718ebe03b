"""Every command of docs/bench_serve.md against a real server: it ends well, and its numbers fit together."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "bench_serve.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\nhalfbyte (.*)\n```$", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_example(demo_server: Any, command: str, tmp_path: Path) -> None:
    words = shlex.split(command.replace("--port 8000", f"--port {demo_server.url.rpartition(':')[2]}"))
    done = subprocess.run(
        [sys.executable, "-m", "halfbyte", *words, "--save-result", "--result-dir", "results"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    num_runs = done.stdout.count("Serving Benchmark Result")
    results = [json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()]
    assert len(results) == num_runs >= 1
    for result in results:
        assert (result["completed"], result["failed"]) == (result["num_prompts"], 0)
        assert result["output_throughput"] == pytest.approx(result["total_output_tokens"] / result["duration"])
        assert result["environment"]["versions"]["halfbyte"]
        if "--ignore-eos" in words:
            assert result["median_tpot_ms"] > 0
            assert result["total_input_tokens"] == 32 * result["num_prompts"]
            assert result["total_output_tokens"] == 16 * result["num_prompts"]
        assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"] <= result["duration"] * 1e3
    if "--plot" in words:
        assert (tmp_path / words[words.index("--plot") + 1]).read_bytes().startswith(b"\x89PNG")


def test_there_are_examples() -> None:
    assert len(COMMANDS) == PAGE.count("```sh") == 3

"""The Triton writer and reader compiled for GPUs that are not here: they get through, and keep all in registers.

On NVIDIA also: no instruction rounds where the law does not, nor flushes denormals. `triton_targets.py` compiles, in a process
of its own; nothing runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from halfbyte.kvcache.formats import FORMATS, get_format
from halfbyte.kvcache.formats.coded import CodedFormat
from halfbyte.kvcache.formats.dense import DenseFormat
from halfbyte.platform import PLATFORM_NAMES

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
TARGETS = [name for name in PLATFORM_NAMES if name != "cpu"]
HELD = [name for name in FORMATS if isinstance(get_format(name), CodedFormat | DenseFormat)]
SHARED_BYTES = 48 << 10  # what every GPU grants without being asked


def compiled(target: str, formats: list[str], cache: Path) -> list[dict[str, str | int]]:
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(ROOT / "tests/kernels/triton_targets.py"), target, *formats]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(target: str, formats: list[str], cache: Path) -> None:
    found = compiled(target, formats, cache)
    assert [(kernel["format"], kernel["kernel"]) for kernel in found] == [
        (name, kind) for name in formats for kind in ("write", "read k", "read v")
    ]
    for kernel in found:
        assert kernel["num_spills"] == 0, kernel
        assert int(kernel["shared_bytes"]) <= SHARED_BYTES, kernel
        if target.startswith("sm"):
            assert (kernel["num_fused"], kernel["num_flushed"]) == (0, 0), kernel


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_nvfp4_compiles(target: str, tmp_path: Path) -> None:
    check(target, ["nvfp4"], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", TARGETS)
def test_every_format_compiles(target: str, tmp_path: Path) -> None:
    check(target, [*HELD, "k:bfloat16,v:kv4", "k:kv6,v:fp8_e5m2"], tmp_path)

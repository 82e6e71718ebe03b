"""How steps are launched: what graphs, compilation and eager steps exclude, and what a CPU does not have."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.config import EngineOptions, ExecutionConfig
from halfbyte.errors import UnsupportedError, UserError
from halfbyte.platform import Platform, platform_named
from halfbyte.resolve import ModelFacts, resolve

CPU, GPU = platform_named("cpu"), platform_named("sm90")
FACTS = ModelFacts(architecture="LlamaForCausalLM", dtype="bfloat16", max_position=8192, vocab_size=49152)


def resolved(platform: Platform = CPU, **options: Any) -> ExecutionConfig:
    return resolve(EngineOptions(**options), FACTS, platform).execution


@pytest.mark.parametrize(
    ("platform", "options", "mode"),
    [
        (CPU, {}, "none"),
        (CPU, {"enforce_eager": True}, "none"),
        (GPU, {}, "auto"),
        (GPU, {"enforce_eager": False}, "auto"),
        (GPU, {"enforce_eager": True}, "none"),
        (GPU, {"compile": "native"}, "none"),
        (GPU, {"cudagraph_mode": "piecewise"}, "piecewise"),
        (GPU, {"cudagraph_mode": "none", "compile": "native"}, "none"),
    ],
)
def test_graphs_or_none(platform: Platform, options: dict[str, Any], mode: str) -> None:
    assert resolved(platform, **options).cudagraph_mode == mode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "native", "enforce_eager": True}, "--compile native and --enforce-eager exclude each other"),
        ({"compile": "native", "cudagraph_mode": "full"}, "--cudagraph-mode full and --compile native exclude each other"),
        ({"enforce_eager": True, "cudagraph_mode": "piecewise"}, "--cudagraph-mode piecewise and --enforce-eager exclude"),
        ({"enforce_eager": True, "cudagraph_capture_sizes": [1]}, "--cudagraph-capture-sizes and --enforce-eager exclude"),
        ({"cudagraph_mode": "none", "cudagraph_capture_sizes": [1]}, "--cudagraph-capture-sizes and --cudagraph-mode none"),
        ({"cudagraph_capture_sizes": ["x"]}, "from 1 to --max-num-batched-tokens 2048, got 'x'"),
        ({"cudagraph_capture_sizes": [4096]}, "got 4096"),
        ({"cudagraph_capture_sizes": []}, "got none"),
        ({"cudagraph_mode": "breakable"}, "--cudagraph-mode must be one of auto, none, piecewise"),
        ({"compile": "max"}, "--compile must be one of none, native"),
    ],
)
def test_wrong_ways_to_launch(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolved(GPU, **options)


def test_what_a_cpu_does_not_launch() -> None:
    asked = {"cudagraph_mode": "full", "cudagraph_capture_sizes": [1], "compile": "native"}
    with pytest.raises(UnsupportedError) as error:
        resolve(EngineOptions(**asked), FACTS, CPU, attention_backends=("cpu", "reference"))
    assert [refusal.reason for refusal in error.value.refusals] == [
        "--cudagraph-mode full needs a GPU",
        "--cudagraph-capture-sizes needs a GPU",
        "--compile native compiles PyTorch, which the compiled CPU kernels do not use",
    ]
    assert resolved(compile="native").compile == "native", "the reference attention is PyTorch"

"""On a GPU, the device computes what the CPU computes: greedy tokens of a real model in float32, token for token."""

from __future__ import annotations

import pytest

from halfbyte import LLM, SamplingParams
from halfbyte.platform import detect_platform

pytestmark = pytest.mark.gpu

PROMPTS = ["The capital of France is", "Once upon a time in a small village by the sea, there lived", "def fibonacci(n):\n    "]


@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_tokens_on_the_device_equal_those_on_the_cpu(model: str) -> None:
    device = detect_platform("auto").device
    if device == "cpu":
        pytest.skip("no GPU that torch can use")
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    tokens = {}
    for name in ("cpu", device):
        llm = LLM(model, device=name, dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20)
        tokens[name] = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        llm.close()
    assert tokens[device] == tokens["cpu"]

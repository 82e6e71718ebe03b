"""A whole start on a GPU that is none: the profile sizes the cache, graphs are captured, steps are scheduled ahead, and a real
model says what it says on the CPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from halfbyte import LLM, SamplingParams
from halfbyte.model_runner.device import DeviceMemory
from halfbyte.platform import platform_named

PROMPTS = ["The capital of France is", "Once upon a time in a small village by the sea, there lived", "def fibonacci(n):\n    "]
NUM_LAYERS = 5
TOTAL, FREE = 80 * 10**9, 79 * 10**9
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "reference",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "hf_overrides": {"num_hidden_layers": NUM_LAYERS},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, fake_device: Any) -> Any:
    device = fake_device.FakeDevice(memory_now=DeviceMemory(TOTAL, FREE, 10**9, 10**9, 10**9))
    platform = replace(platform_named("sm90"), memory_limit_bytes=TOTAL, num_threads=2)
    monkeypatch.setattr("halfbyte.engine.build.detect_platform", lambda name: platform)
    monkeypatch.setattr("halfbyte.engine.build.available_memory_bytes", lambda platform: FREE)
    monkeypatch.setattr("halfbyte.model_runner.runner.make_device", lambda name: device)
    return device


def runner_of(llm: LLM) -> Any:
    client: Any = llm._client
    return client._core.runner


def test_a_model_says_on_it_what_it_says_on_the_cpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1)] * 3
    llm = LLM("smollm2-135m", cudagraph_capture_sizes=[1, 4], **OPTIONS)
    report = "\n".join(llm.info.report)
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    assert gpu.count["captures"] == 4, "two sizes, for the profile and for good"
    assert gpu.count["replays"] >= 12 and gpu.count["graphs"] == 4 * (NUM_LAYERS + 1)
    for level, captures in ((1, 6), (2, 8)):
        llm.sleep(level)
        assert runner_of(llm).missing == ("weights", "kv_cache"), "a GPU's weights go to the host, or away"
        llm.wake_up(["weights"])
        assert llm.is_sleeping and gpu.count["captures"] == captures - 2
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping and gpu.count["captures"] == captures
        [again] = llm.generate(PROMPTS[:1], params[0].clone(max_tokens=3, prompt_logprobs=None), use_tqdm=False)
        assert again.outputs[0].token_ids == found[0].outputs[0].token_ids[:3]
    llm.close()
    assert "graphs: decode batches piecewise of 2 sizes up to 4 tokens, mixed batches piecewise of 2 sizes" in report
    assert re.search(r"GPU memory: 0.92 x 80,000,000,000 bytes = 73,600,000,000 bytes - 0 outside torch - [\d,]+ weights", report)
    assert {"profile memory", "capture graphs"} <= {name for name, _ in llm.info.phases}
    monkeypatch.undo()
    llm = LLM("smollm2-135m", device="cpu", **OPTIONS)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.close()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        values = [[entry[token].logprob for token in entry] for entry in ours.prompt_logprobs[1:]]
        wanted = [[entry[token].logprob for token in entry] for entry in theirs.prompt_logprobs[1:]]
        for a, b in zip(values, wanted, strict=True):
            assert a == pytest.approx(b, abs=1e-3)  # products of padded batches sum in another order

"""Equal tokens whatever the batch, the chunking, the cache or the process: greedy and seeded, token for token in fp32.

Logits in bf16 may differ in their last bits between batch shapes; `test_bf16_logprobs_stay_close` states by how much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from halfbyte import LLM, RequestOutput, SamplingParams
from halfbyte.config import EngineOptions
from halfbyte.engine.client import ProcessClient

PROMPTS = [
    "The capital of France is",
    "Once upon a time in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "List three colours: " * 9,
    "The quick brown fox jumps over the lazy dog. " * 6 + "Then",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
BF16_LOGPROB_TOLERANCE = 0.15  # bf16 has 8 bits of mantissa: logits near 20 are 1/8 apart before the softmax in fp32


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with open_llm(model) as opened:
        yield opened


def open_llm(model: str, **options: Any) -> closing[LLM]:
    return closing(LLM(model, **(OPTIONS | options)))


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """Each prompt's tokens when it runs by itself, without the prefix cache's help (the first run of each)."""
    return [tokens(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sequence.token_ids for output in outputs for sequence in output.outputs]


def test_batched_equals_alone(llm: LLM, alone: list[list[int]]) -> None:
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone


def test_prefix_hit_equals_miss(llm: LLM, alone: list[list[int]]) -> None:
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert sum(output.num_cached_tokens or 0 for output in again) > 0, "nothing was found in the prefix cache"
    assert tokens(again) == alone


def test_chunked_equals_unchunked(model: str, alone: list[list[int]]) -> None:
    with open_llm(model, max_num_batched_tokens=16, max_num_seqs=4, enable_prefix_caching=False) as chunked:
        assert tokens(chunked.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone


def test_preempted_equals_not(model: str, alone: list[list[int]]) -> None:
    # The longest prompt with its answer needs about 90 tokens per group; Gemma's six groups share the pool.
    num_blocks = 16 if model == "smollm2-135m" else 60
    with open_llm(model, num_gpu_blocks_override=num_blocks, max_model_len=128, enable_prefix_caching=False) as tight:
        outputs = tight.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tight.num_preemptions > 0, "the pool was never short"
    assert tokens(outputs) == alone


def test_separate_process_equals_in_process(model: str, alone: list[list[int]]) -> None:
    options = EngineOptions(model=model, **OPTIONS)
    remote = LLM.from_client(ProcessClient.start(options), options)
    try:
        assert tokens(remote.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone
    finally:
        remote.close()


def test_n_with_a_seed_equals_requests_with_seeds(llm: LLM) -> None:
    prompt = "Once upon a time"
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7, n=4)
    together = tokens(llm.generate(prompt, params, use_tqdm=False))
    alone = [tokens(llm.generate(prompt, params.clone(n=1, seed=7 + i), use_tqdm=False))[0] for i in range(4)]
    batched = tokens(llm.generate([prompt] * 4, [params.clone(n=1, seed=7 + i) for i in range(4)], use_tqdm=False))
    assert together == alone == batched
    assert len(set(map(tuple, together))) > 1


def test_bf16_logprobs_stay_close(model: str) -> None:
    """The same prompt alone and in a batch, bf16: log probabilities of its tokens agree within the stated tolerance."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def prompt_logprobs(output: RequestOutput) -> list[float]:
        ids = output.prompt_token_ids[1:]
        return [p[i].logprob for p, i in zip((output.prompt_logprobs or [])[1:], ids, strict=True) if p is not None]

    with open_llm(model, dtype="bfloat16", enable_prefix_caching=False) as llm:
        together = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt, batched in zip(PROMPTS, together, strict=True):
            single = llm.generate([prompt], params, use_tqdm=False)[0]
            assert prompt_logprobs(single) == pytest.approx(prompt_logprobs(batched), abs=BF16_LOGPROB_TOLERANCE)

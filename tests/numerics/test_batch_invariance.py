"""The compiled CPU kernels: the same bits of tokens and log probabilities in every batch, cut and state of the prefix cache.

In every precision that the demo model runs in here: packed 4-bit blocks, bfloat16, float16, float32 and 8-bit blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, TypeAlias

import pytest

from halfbyte import LLM, RequestOutput, SamplingParams
from halfbyte.kernels.cpu.library import KernelsMissing, load

try:
    load()
except KernelsMissing as reason:
    pytest.skip(str(reason), allow_module_level=True)

TEXT = "The harbour was quiet before dawn, and the boats lay in a row along the stone wall as they had for a hundred years. " * 4
# 20 prompts of 1 to 20 words and more, of which some share a beginning.
PROMPTS = [" ".join(TEXT.split()[start : start + 3 + 4 * start]) for start in range(20)]
ASK = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PRECISIONS: dict[str, dict[str, Any]] = {
    "packed": {},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "float16": {"dtype": "float16", "quantization": "none"},
    "float32": {"dtype": "float32", "quantization": "none"},
    "int8": {"quantization": "int8"},
}

Answer: TypeAlias = tuple[list[int], list[dict[int, float]]]


def open_llm(options: dict[str, Any], **more: Any) -> closing[LLM]:
    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 128 << 20, "num_threads": 2}
    return closing(LLM("smollm2-135m", **(settings | options | more)))


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    """Token ids, and every reported log probability: floats, compared as they are."""
    found = []
    for output in outputs:
        assert output.outputs[0].logprobs is not None
        logprobs = [{token: entry.logprob for token, entry in at.items()} for at in output.outputs[0].logprobs]
        found.append((output.outputs[0].token_ids, logprobs))
    return found


def in_batches(llm: LLM, size: int) -> list[Answer]:
    """All prompts, `size` at a time, the last ones filled up with the first."""
    padded = PROMPTS + PROMPTS[: -len(PROMPTS) % size]
    batches = [padded[start : start + size] for start in range(0, len(padded), size)]
    return [answer for batch in batches for answer in answers(llm.generate(batch, ASK, use_tqdm=False))][: len(PROMPTS)]


@pytest.fixture(scope="module", params=PRECISIONS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PRECISIONS[str(request.param)]


@pytest.fixture(scope="module")
def alone(options: dict[str, Any]) -> Iterator[list[Answer]]:
    with open_llm(options, enable_prefix_caching=False) as llm:
        yield in_batches(llm, 1)


def test_packed_blocks_give_the_bits_of_unpacked_ones() -> None:
    found = []
    for quantization in ("auto", "none"):
        with open_llm({"dtype": "float32", "quantization": quantization}, enable_prefix_caching=False) as llm:
            found.append(in_batches(llm, 8))
    assert found[0] == found[1]


def test_batches_of_2_8_and_32(options: dict[str, Any], alone: list[Answer]) -> None:
    with open_llm(options, enable_prefix_caching=False) as llm:
        for size in (2, 8, 32):
            assert in_batches(llm, size) == alone, size


def test_chunks_prefix_hits_and_threads(options: dict[str, Any], alone: list[Answer]) -> None:
    with open_llm(options, max_num_batched_tokens=24, max_num_seqs=8, num_threads=1) as llm:
        first = llm.generate(PROMPTS, ASK, use_tqdm=False)
        second = llm.generate(PROMPTS, ASK, use_tqdm=False)
        assert sum(output.num_cached_tokens or 0 for output in second) > 0
        assert answers(first) == alone
        assert answers(second) == alone

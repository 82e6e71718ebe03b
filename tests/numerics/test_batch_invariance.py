"""The compiled CPU kernels: the same bits of tokens and log probabilities in every batch, cut and state of the prefix cache.

In every precision that the demo model runs in here: packed 4-bit blocks with activations of 16 and 8 bits, bfloat16, float16,
float32 and 8-bit blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, TypeAlias

import pytest

from halfbyte import LLM, RequestOutput, SamplingParams
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.cpu.library import KernelsMissing, instruction_sets
from halfbyte.model_runner.cpu_model import NARROW_ISAS

try:
    instruction_sets()
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
narrow = pytest.mark.skipif(instruction_sets()[0] not in NARROW_ISAS, reason="this machine does not multiply bytes")
EVERY = [*PRECISIONS.values(), pytest.param({"cpu_activations": "int8"}, marks=narrow)]

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


@pytest.fixture(scope="module", params=EVERY, ids=[*PRECISIONS, "8-bit activations"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


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


@narrow
def test_activations_of_16_bits_keep_the_answers() -> None:
    """Beside float32 throughout: the same tokens, and log probabilities nearer than bfloat16 could tell logits of 2 apart."""
    found = []
    for dtype in ("float32", "bfloat16"):
        with open_llm({"dtype": dtype, "kv_cache_dtype": "float32"}, enable_prefix_caching=False) as llm:
            found.append(in_batches(llm, 8))
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    pairs = [(x, y) for (_, wide), (_, narrow) in zip(*found, strict=True) for x, y in zip(wide, narrow, strict=True)]
    assert max(abs(x[token] - y[token]) for x, y in pairs for token in x.keys() & y.keys()) < 2**-7


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float32"}, "--dtype float32 computes in float32"),
        ({"quantization": "none"}, "weights are stored as bf16"),
    ],
    ids=["dtype", "weights"],
)
def test_activations_of_8_bits_are_refused_where_nothing_uses_them(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"--cpu-activations int8: .*{reason}"):
        open_llm(options, cpu_activations="int8")


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

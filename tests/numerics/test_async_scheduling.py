"""The real runner with a step ahead: every answer is the one without it, to the last bit of its log probabilities.

Requests end at different steps, by every rule there is; pools are full, prompts are cut, prefixes are found in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, RequestOutput, SamplingParams

TEXTS = ["the quick brown fox", "jumps over", "a lazy dog sleeps in the warm sun and", "the warm sun " * 8]
A = 2 + 64  # the token "a": two special ones, then the bytes in their order, of which the first printable one is "!"
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
SHAPES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 5},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 64},
    "full": {"max_model_len": 128, "max_num_seqs": 12},
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random checkpoint of full attention, or with windows of 20 tokens."""
    path = tmp_path_factory.mktemp(request.param)
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(TEXTS * 3, trainer)
    trained.save(str(path / "tokenizer.json"))
    shape: dict[str, Any] = {
        "vocab_size": trained.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.4,
    }
    torch.manual_seed(0)
    if request.param == "llama":
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **shape)).save_pretrained(path)
        return str(path)
    layers = ["sliding_attention", "full_attention"]
    windows = transformers.Gemma3TextConfig(num_hidden_layers=2, head_dim=16, sliding_window=20, layer_types=layers, **shape)
    transformers.Gemma3ForCausalLM(windows).save_pretrained(path)
    return str(path)


def requests(greedy: list[list[int]]) -> tuple[list[str], list[SamplingParams]]:
    """Prompts and what they ask. greedy: how each text goes on, so that stop tokens are met half-way."""
    asked: list[tuple[str, SamplingParams]] = []
    for number, (text, tokens) in enumerate(zip(TEXTS, greedy, strict=True)):
        plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
        random = SamplingParams(seed=number, max_tokens=18, ignore_eos=True, logprobs=1)
        asked += [
            (text, plain.clone(max_tokens=1 + number)),
            (text, plain.clone(stop_token_ids=[tokens[3 + 2 * number]])),
            (text, plain.clone(stop_token_ids=[tokens[2]], min_tokens=5, prompt_logprobs=1)),
            (text, random.clone(n=3, top_p=0.9)),
            (text, random.clone(top_k=20, ignore_eos=False, stop=["e", "o"])),
            (text, random.clone(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)),
            (text, plain.clone(bad_words=[" the", "sun"], logit_bias={tokens[0]: 5.0, 7: 3.0}, prompt_logprobs=0)),
        ]
    # After its first token the only one that is allowed is forbidden: a request that turns bad in its second step.
    asked.append((TEXTS[1], SamplingParams(temperature=0.0, allowed_token_ids=[A], bad_words=["aa"])))
    return [text for text, _ in asked], [params for _, params in asked]


def run(llm: LLM, greedy: list[list[int]]) -> list[RequestOutput]:
    texts, params = requests(greedy)
    return llm.generate(texts, params, use_tqdm=False)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """All that a user sees of an answer, but for what the cache gave."""
    return [
        (output.prompt_logprobs, [(s.token_ids, s.text, s.logprobs, s.finish_reason, s.stop_reason) for s in output.outputs])
        for output in outputs
    ]


@pytest.fixture(scope="module")
def greedy(model: str) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with closing(LLM(model, async_scheduling=False, **OPTIONS)) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(TEXTS, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model: str, greedy: list[list[int]]) -> list[Any]:
    """Without a step ahead, and every way to end is there."""
    with closing(LLM(model, async_scheduling=False, **OPTIONS)) as llm:
        found = answers(run(llm, greedy))
    ends = {end for _, sequences in found for *_, end, _ in sequences}
    assert ends == {"stop", "length", "error"}
    assert found[-1][1][0][:2] == ([A], "a")
    return found


@pytest.fixture
def open_llm(model: str) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def open_one(**options: Any) -> LLM:
        opened.append(LLM(model, async_scheduling=True, **(OPTIONS | options)))
        return opened[-1]

    yield open_one
    for llm in opened:
        llm.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_those_without_a_step_ahead(
    open_llm: Callable[..., LLM], greedy: list[list[int]], expected: list[Any], shape: str
) -> None:
    llm = open_llm(**SHAPES[shape])
    if shape == "full":  # a pool for one request of the greatest length
        num_blocks = 1 + round((llm.info.num_blocks - 1) / llm.info.max_concurrency)
        llm = open_llm(num_gpu_blocks_override=num_blocks, **SHAPES[shape])
    assert answers(run(llm, greedy)) == expected
    assert (llm.num_preemptions > 0) == (shape == "full")
    again = run(llm, greedy)
    assert answers(again) == expected
    assert (sum(output.num_cached_tokens or 0 for output in again) > 0) == (shape != "uncached")


def test_tokens_that_arrive_late_are_those_tokens(
    open_llm: Callable[..., LLM],
    greedy: list[list[int]],
    expected: list[Any],
    fake_device: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device whose results are copied when they are waited for. PyTorch's products there differ in their last bits from
    batch to batch, so that log probabilities are left out."""
    devices: list[Any] = []

    def make_device(name: str) -> Any:
        devices.append(fake_device.FakeDevice())
        return devices[-1]

    monkeypatch.setattr("halfbyte.model_runner.runner.make_device", make_device)
    outputs = run(open_llm(attention_backend="reference", max_num_batched_tokens=48), greedy)
    assert devices[-1].count["downloads"] > 20
    for (_, sequences), output in zip(expected, outputs, strict=True):
        assert [(s.token_ids, s.finish_reason) for s in output.outputs] == [(ids, end) for ids, _, _, end, _ in sequences]

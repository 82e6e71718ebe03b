"""Structured outputs through the real runner: whole answers, and equal tokens whatever happens beside a request.

A tiny random model has no idea of JSON: that its answers are JSON is the grammar's doing alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, SamplingParams
from halfbyte.config import EngineOptions
from halfbyte.engine.client import ProcessClient
from halfbyte.errors import ModelFileError, UserError
from halfbyte.types import StructuredOutputsParams

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "max_model_len": 256}
PET = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
ASKED = {
    "schema": StructuredOutputsParams(json=PET),
    "object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"[a-z]{3,9}@[a-z]{2,5}\.com"),
    "choice": StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
}
TEXTS = ["a pet, please", "the sun " * 12, "a pet, please, and another one", "who"]
SHAPES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "uncached": {"enable_prefix_caching": False},
    "ahead": {"async_scheduling": True},
    "full": {"max_model_len": 128},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator([*TEXTS, '{"name": "cat", "age": 1, "kind": "dog"}'] * 9, trainer)
    trained.save(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=trained.get_vocab_size() + 9,  # wider than the tokenizer
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    with closing(LLM(model, async_scheduling=False, **OPTIONS)) as llm:
        yield llm


def requests() -> tuple[list[str], list[SamplingParams]]:
    asked: list[tuple[str, SamplingParams]] = []
    for number, text in enumerate(TEXTS):
        for kind in ASKED.values():
            greedy = SamplingParams(temperature=0.0, max_tokens=48, structured_outputs=kind)
            asked += [(text, greedy), (text, greedy.clone(temperature=1.0, seed=number, logprobs=2))]
        asked.append((text, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)))
    return [text for text, _ in asked], [params for _, params in asked]


def answers(llm: LLM, texts: list[str], params: list[SamplingParams]) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].text, output.outputs[0].finish_reason)
        for output in llm.generate(texts, params, use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[Any]:
    """Each request alone."""
    return [found for text, params in zip(*requests(), strict=True) for found in answers(plain, [text], [params])]


def fits(kind: StructuredOutputsParams, text: str) -> bool:
    if kind.choice is not None:
        return text in kind.choice
    if kind.regex is not None:
        return re.fullmatch(kind.regex, text) is not None
    value = json.loads(text)
    if kind.json_object:
        return isinstance(value, dict)
    return list(value) == ["name", "age", "kind"] and value["kind"] in ("cat", "dog") and isinstance(value["age"], int)


def test_every_answer_is_what_was_asked_for(expected: list[Any]) -> None:
    for (_, text, reason), params in zip(expected, requests()[1], strict=True):
        if params.structured_outputs is not None:
            assert reason == "stop" and fits(params.structured_outputs, text)


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_are_those_of_requests_that_are_alone(model: str, expected: list[Any], shape: str) -> None:
    options = OPTIONS | {"async_scheduling": False} | SHAPES[shape]
    if shape == "full":  # a pool for one request of the greatest length
        with closing(LLM(model, **options)) as llm:
            options["num_gpu_blocks_override"] = 1 + round((llm.info.num_blocks - 1) / llm.info.max_concurrency)
    with closing(LLM(model, **options)) as llm:
        assert answers(llm, *requests()) == expected
        assert (llm.num_preemptions > 0) == (shape == "full")
        assert answers(llm, *requests()) == expected, "with prefixes from the cache"


def test_answers_of_an_engine_process_are_the_same(model: str, expected: list[Any]) -> None:
    options = EngineOptions(model=model, **OPTIONS)
    with closing(LLM.from_client(ProcessClient.start(options), options)) as llm:
        assert answers(llm, *requests()) == expected


def test_several_sequences_have_an_answer_each(plain: LLM) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=48, structured_outputs=ASKED["schema"])
    [output] = plain.generate("a pet", params, use_tqdm=False)
    assert all(fits(ASKED["schema"], sequence.text) for sequence in output.outputs)
    assert len({sequence.text for sequence in output.outputs}) > 1


@pytest.mark.parametrize("num_tokens", range(26, 48, 3))
def test_an_answer_is_whole_however_few_tokens_it_has(plain: LLM, num_tokens: int) -> None:
    params = [SamplingParams(seed=i, max_tokens=num_tokens, structured_outputs=ASKED["schema"]) for i in range(8)]
    for output in plain.generate(["a pet"] * 8, params, use_tqdm=False):
        assert fits(ASKED["schema"], output.outputs[0].text)


def test_what_cannot_be_asked_is_refused_before_anything_runs(plain: LLM) -> None:
    for kind in (StructuredOutputsParams(json={"type": "nothing"}), StructuredOutputsParams(regex="(")):
        with pytest.raises(UserError) as refused:
            plain.generate("a pet", SamplingParams(structured_outputs=kind), use_tqdm=False)
        assert (refused.value.param or "").startswith("structured_outputs")
    with pytest.raises(UserError, match="--reasoning-parser"):
        plain.generate("a pet", SamplingParams(thinking_token_budget=3), use_tqdm=False)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    try:
        llm = LLM("smollm2-135m", max_model_len=512, kv_cache_memory_bytes=64 << 20)
    except ModelFileError as error:
        pytest.skip(str(error))
    with closing(llm):
        yield llm


@pytest.mark.parametrize("kind", ASKED)
def test_a_real_model_answers_in_form(smollm: LLM, kind: str) -> None:
    params = [SamplingParams(seed=i, max_tokens=40, structured_outputs=ASKED[kind]) for i in range(4)]
    for output in smollm.generate(["My pet as JSON:"] * 4, params, use_tqdm=False):
        assert output.outputs[0].finish_reason == "stop" and fits(ASKED[kind], output.outputs[0].text)

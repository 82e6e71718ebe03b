"""What decisions read is what the model says: against its generations and teacher-forced prompts, to the bit where it can be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from halfbyte import LLM, SamplingParams
from halfbyte.errors import UserError
from halfbyte.kernels.cpu.library import KernelsMissing, instruction_sets

try:
    instruction_sets()
except KernelsMissing as reason:
    pytest.skip(str(reason), allow_module_level=True)

STATE = "The boat left the harbour at dawn, the wind was fair, and nobody on board had slept. " * 2
QUESTIONS: dict[str, Any] = {
    "calm": {"type": "noul", "instructions": "Is the sea calm?"},
    "who": {"type": "choice", "instructions": "Who speaks?", "criteria": {"sailor": "on board", "fisher": None, "child": None}},
    "mood": {"type": "score", "instructions": "How tired are they?", "criteria": ["not", "a little", "very"]},
    "many": {"type": "choice", "instructions": "Which word?", "criteria": {f"word {i}": None for i in range(30)}},
}


def open_llm(**options: Any) -> closing[LLM]:
    settings: dict[str, Any] = {"max_model_len": 2048, "kv_cache_memory_bytes": 192 << 20, "num_threads": 2}
    return closing(LLM("smollm2-135m", **(settings | options)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as made:
        yield made


def numbers(llm: LLM, questions: dict[str, Any] = QUESTIONS, **options: Any) -> str:
    told = llm.decide(STATE, questions, **options)
    return repr((told.answers, told.diagnostics))


def test_labels_have_the_probabilities_of_a_generation(llm: LLM) -> None:
    told = llm.decide(STATE, {name: QUESTIONS[name] for name in ("calm", "who", "mood")}, return_prompt=True)
    labels = {"calm": ["yes", "no"], "who": ["A", "B", "C"], "mood": ["0", "1", "2"]}
    for name, entry in told.diagnostics.items():
        [prompt] = entry.prompts
        spellings = [dict.fromkeys((label, label.capitalize())) for label in labels[name]]
        ids = [[llm.get_tokenizer().token_id(spelling) for spelling in of_label] for of_label in spellings]
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=sum(ids, []))
        [output] = llm.generate({"prompt_token_ids": prompt.token_ids}, params, use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        position = output.outputs[0].logprobs[0]
        chances = [sum(math.exp(position[token].logprob) for token in of_label) for of_label in ids]
        assert list(told.answers[name].probabilities.values()) == pytest.approx([c / sum(chances) for c in chances])
        assert entry.label_mass == pytest.approx(sum(chances))
        assert entry.argmax_is_label is (output.outputs[0].token_ids[0] in sum(ids, []))


def test_many_calls_in_one_batch_are_answered_as_each_alone(llm: LLM) -> None:
    calls = [(STATE, {"calm": QUESTIONS["calm"]}, "Be strict."), ("x", {"calm": QUESTIONS["calm"]}, None)]
    many = llm.decide_many(calls)
    for (state, questions, instructions), found in zip(calls, many, strict=True):
        alone = llm.decide(state, questions, instructions=instructions, return_prompt=True)
        assert found.answers[0].probabilities == list(alone.answers["calm"].probabilities.values())
        assert ("Be strict." in alone.diagnostics["calm"].prompts[0].text) is (instructions is not None)


def test_f06_labels_of_several_tokens_have_the_probabilities_of_a_forced_text(llm: LLM) -> None:
    told = llm.decide(STATE, {"many": QUESTIONS["many"]}, return_prompt=True)
    [prompt] = told.diagnostics["many"].prompts
    tokenizer = llm.get_tokenizer()
    logprobs = []
    shown = (1, 10, 19, 30)
    for number in shown:
        label = tokenizer.encode(f"{number:02d}", False)
        assert len(label) == 2, "digits are tokens of their own here"
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate({"prompt_token_ids": [*prompt.token_ids, *label]}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        positions = zip(output.prompt_logprobs[-2:], label, strict=True)
        logprobs.append(sum(position[token].logprob for position, token in positions if position))
    found = [told.answers["many"].probabilities[f"word {number - 1}"] for number in shown]
    assert [p / found[0] for p in found] == pytest.approx([math.exp(value - logprobs[0]) for value in logprobs], rel=1e-4)


def test_f01_the_same_bits_whatever_happens_beside_it() -> None:
    with open_llm() as one:
        cold = numbers(one)
        assert numbers(one) == cold, "warm"
        assert numbers(one, cache_salt="another") == cold, "cold again"
        alone = {name: numbers(one, {name: spec}, cache_salt=name) for name, spec in QUESTIONS.items()}
        told = one.decide(STATE, QUESTIONS)
        assert alone == {name: repr(({name: told.answers[name]}, {name: told.diagnostics[name]})) for name in QUESTIONS}
    with open_llm(enable_prefix_caching=False, max_num_batched_tokens=96, num_threads=1) as other:
        told = other.decide(STATE, QUESTIONS)
        assert repr((told.answers, told.diagnostics)) == cold, "in other chunks, without a cache, with one thread"
        details = told.usage.input_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (0, 0)


def test_f07_a_prompt_may_fill_the_context() -> None:
    with open_llm(max_model_len=256, kv_cache_memory_bytes=16 << 20) as one:
        questions = {"calm": QUESTIONS["calm"]}
        empty = one.decide(" a", questions, return_prompt=True)
        room = 256 - len(empty.diagnostics["calm"].prompts[0].token_ids)
        full = one.decide(" a" * (1 + room), questions)
        assert full.usage.input_tokens == 256
        with pytest.raises(UserError, match="question 'calm': its prompt has 257 tokens, but max_model_len=256"):
            one.decide(" a" * (2 + room), questions)
        assert repr(one.decide(" a" * (1 + room), questions).answers) == repr(full.answers)

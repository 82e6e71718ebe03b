"""Beam search of `LLM`: the beams of transformers where both define the same, those of the definition always, alone or not.

transformers counts only generated tokens in a score's length, and of the candidates that end a beam takes only those among the
first `num_beams`. Both make no difference where nothing ends a beam: there its beams are ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from halfbyte import LLM, BeamSearchParams
from halfbyte.entrypoints.outputs import BeamSearchOutput
from halfbyte.errors import UserError

PROMPTS = ["the quick brown fox", "jumps over", "a lazy dog sleeps in the warm sun and"]
EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer checkpoint that likes its end of text: about every second beam meets it."""
    path = tmp_path_factory.mktemp("tiny-llama")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(PROMPTS * 3, trainer)
    trained.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=trained.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=EOS,
        initializer_range=0.12,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # towards the end of text, whatever the hidden state's mean is
        model.lm_head.weight[EOS] = model.lm_head.weight[:16].mean(0) * 6
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> transformers.LlamaForCausalLM:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # its own beams never end
    return model


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), dtype="float32", kv_cache_memory_bytes=8 << 20)
    yield made
    made.close()


def found(output: BeamSearchOutput) -> list[tuple[list[int], float]]:
    return [(sequence.tokens, sequence.cum_logprob) for sequence in output.sequences]


def defined(
    model: transformers.LlamaForCausalLM, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float, float]]:
    """The law: vLLM's definition, with all log probabilities at hand, and no step left out. (tokens, sum, score)."""

    def score(tokens: list[int], total: float) -> float:
        return total / (len(tokens) - (tokens[-1] == EOS and not params.ignore_eos)) ** params.length_penalty

    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        grown = []
        with torch.inference_mode():
            rows = torch.log_softmax(model(torch.tensor([tokens for tokens, _ in beams])).logits[:, -1].double(), -1)
        for (tokens, total), row in zip(beams, rows, strict=True):
            values, ids = row.topk(2 * params.beam_width)
            for value, token_id in zip(values.tolist(), ids.tolist(), strict=True):
                ends = token_id == EOS and not params.ignore_eos
                (ended if ends else grown).append(([*tokens, token_id], total + value))
        beams = sorted(grown, key=lambda beam: score(*beam), reverse=True)[: params.beam_width]
    best = sorted([*ended, *beams], key=lambda beam: score(*beam), reverse=True)[: params.beam_width]
    return [(tokens, total, score(tokens, total)) for tokens, total in best]


@pytest.mark.parametrize("beam_width", [1, 2, 5])
def test_without_an_end_the_beams_are_those_of_transformers(
    folder: Path, reference: transformers.LlamaForCausalLM, llm: LLM, tolerances: dict[str, float], beam_width: int
) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(beam_width, 8, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        theirs = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=beam_width,
            num_return_sequences=beam_width,
            max_new_tokens=8,
            do_sample=False,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert [sequence.tokens for sequence in output.sequences] == theirs.sequences.tolist()
        if beam_width > 1:
            sums = (theirs.sequences_scores * 8).tolist()
            assert [s.cum_logprob for s in output.sequences] == pytest.approx(sums, abs=8 * tolerances["random_model_fp32"])
        assert all(sequence.finish_reason == "length" for sequence in output.sequences)


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
@pytest.mark.parametrize("beam_width", [1, 3, 6])
def test_the_definition(
    reference: transformers.LlamaForCausalLM,
    llm: LLM,
    tolerances: dict[str, float],
    beam_width: int,
    length_penalty: float,
) -> None:
    params = BeamSearchParams(beam_width, 12, length_penalty=length_penalty)
    num_ended = 0
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        expected = defined(reference, llm.get_tokenizer().encode(prompt), params)
        assert [tokens for tokens, _ in found(output)] == [tokens for tokens, _, _ in expected]
        sums = [total for _, total, _ in expected]
        assert [total for _, total in found(output)] == pytest.approx(sums, abs=12 * tolerances["random_model_fp32"])
        for sequence in output.sequences:
            ended = sequence.tokens[-1] == EOS
            num_ended += ended
            assert sequence.finish_reason == ("stop" if ended else "length")
            own = sequence.tokens[-len(sequence.logprobs) :]
            assert sequence.cum_logprob == pytest.approx(
                sum(position[token].logprob for position, token in zip(sequence.logprobs, own, strict=True))
            )
    assert num_ended or (beam_width, length_penalty) != (6, 0.0), "otherwise nothing is shown of ends"


def test_nothing_depends_on_what_runs_beside(llm: LLM) -> None:
    params = BeamSearchParams(4, 10)
    together = llm.beam_search(PROMPTS, params)
    assert together == [llm.beam_search(prompt, params)[0] for prompt in PROMPTS]
    assert together == llm.beam_search(PROMPTS, params, concurrency_limit=2)


def test_what_a_sequence_says(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(PROMPTS[0])
    [hidden] = llm.beam_search(ids, BeamSearchParams(6, 12))
    [shown] = llm.beam_search({"prompt": PROMPTS[0], "cache_salt": "s"}, BeamSearchParams(6, 12, include_stop_str_in_output=True))
    assert found(hidden) == found(shown)
    ends = [index for index, sequence in enumerate(hidden.sequences) if sequence.tokens[-1] == EOS]
    assert ends
    for index, (one, other) in enumerate(zip(hidden.sequences, shown.sequences, strict=True)):
        assert one.text.startswith(PROMPTS[0])
        assert other.text == one.text + ("</s>" if index in ends else "")


def test_a_beam_fills_the_context_and_no_more(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[2])
    [output] = llm.beam_search(ids, BeamSearchParams(2, llm.info.max_model_len, ignore_eos=True))
    assert [len(sequence.tokens) for sequence in output.sequences] == [llm.info.max_model_len] * 2


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"beam_width": 0}, "beam_width", "beam_width must be at least 1, got 0"),
        ({"beam_width": True}, "beam_width", "beam_width must be at least 1, got True"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        ({"temperature": 0.7}, "temperature", "temperature must be 0: beam search draws nothing, got 0.7"),
        ({"length_penalty": math.nan}, "length_penalty", "length_penalty must be from -32 to 32, got nan"),
        ({"length_penalty": "1"}, "length_penalty", "length_penalty must be from -32 to 32, got '1'"),
        ({"beam_width": 11}, "beam_width", r"beam_width=11 needs the 22 best .* at most 20 are possible \(--max-logprobs\)"),
        ({"max_tokens": 10**6}, "max_tokens", "max_tokens=1000000 cannot be greater than max_model_len"),
    ],
)
def test_wrong_parameters(llm: LLM, changes: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        llm.beam_search(PROMPTS, BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | changes))
    assert raised.value.param == param

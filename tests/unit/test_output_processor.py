"""From engine outputs to text deltas: ends of every kind, stop strings, min_tokens, logprobs that fit the text."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from halfbyte.engine.output_processor import OutputProcessor, SequenceDelta
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.types import EngineOutput, SamplingParams, TokenLogprobs


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token per byte, and </s>."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, eos_token="</s>")


class Driver:
    """One request whose engine gives `size` tokens per step."""

    def __init__(self, tokenizer: Tokenizer, size: int = 1, **fields: object) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.processor = OutputProcessor(tokenizer)
        self.processor.add("r", 3, [], SamplingParams(**{"max_tokens": None, **fields}))  # type: ignore[arg-type]
        self.aborts = 0

    def run(self, text: str | bytes, finish: str | None = "length", stop_token: int | None = None) -> list[SequenceDelta]:
        by_bytes = {self.tokenizer.token_bytes(i): i for i in range(self.tokenizer.vocab_size)}
        data = text.encode() if isinstance(text, str) else text
        ids = [by_bytes[bytes([byte])] for byte in data]
        if finish == "stop":
            assert self.tokenizer.eos_token_id is not None
            ids.append(self.tokenizer.eos_token_id if stop_token is None else stop_token)
        deltas = []
        for start in range(0, len(ids), self.size):
            chunk = ids[start : start + self.size]
            is_last = start + self.size >= len(ids)
            output = EngineOutput(
                "r",
                chunk,
                logprobs=[TokenLogprobs(i, -1.0, 1, [], []) for i in chunk],
                finish_reason=finish if is_last else None,  # type: ignore[arg-type]
                stop_token_id=stop_token if is_last and finish == "stop" else None,
            )
            delta, needs_abort = self.processor.process(output)
            self.aborts += needs_abort
            if delta is not None:
                deltas.append(delta)
        return deltas


def text_of(deltas: list[SequenceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def token_texts_of(deltas: list[SequenceDelta]) -> str:
    return "".join(text for delta in deltas for text in delta.token_texts)


sizes = pytest.mark.parametrize("size", [1, 2, 5, 100])


@sizes
@pytest.mark.parametrize("text", ["hello", "👋🏽 ďábel 漢\n1. Carol", "", "漢".encode()[:2], b"a\xffb\xe2"])
@pytest.mark.parametrize("finish", ["length", "stop", "abort"])
def test_token_texts_join_to_the_text(tokenizer: Tokenizer, size: int, text: str | bytes, finish: str) -> None:
    deltas = Driver(tokenizer, size).run(text, finish)
    expected = text if isinstance(text, str) else text.decode("utf-8", "replace")
    assert text_of(deltas) == token_texts_of(deltas) == expected
    for delta in deltas:
        assert delta.index == 3
        assert delta.logprobs is not None and len(delta.token_ids) == len(delta.token_texts) == len(delta.logprobs)
    if deltas:
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [finish]


@sizes
def test_a_stop_string_ends_the_sequence_and_the_engine_is_told(tokenizer: Tokenizer, size: int) -> None:
    driver = Driver(tokenizer, size, stop=["END"])
    deltas = driver.run("one E and END two")
    assert text_of(deltas) == "one E and "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    ids = [i for d in deltas for i in d.token_ids]
    assert tokenizer.decode(ids) == "one E and END", "the tokens go up to the one that completed the match"
    assert sum(len(d.logprobs or ()) for d in deltas) == len(ids) == sum(len(d.token_texts) for d in deltas)
    assert driver.aborts == (1 if size < 17 else 0), "a sequence that the engine ended itself needs no abort"


def test_the_stop_string_is_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    deltas = Driver(tokenizer, stop=["END"], include_stop_str_in_output=True).run("one END two")
    assert text_of(deltas) == "one END"


def test_after_a_match_later_outputs_are_ignored(tokenizer: Tokenizer) -> None:
    driver = Driver(tokenizer, stop=["b"])
    driver.run("ab", finish=None)
    assert driver.processor.process(EngineOutput("r", [1, 2])) == (None, False)
    assert driver.processor.process(EngineOutput("r", [], finish_reason="abort")) == (None, False)


def test_what_was_held_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer) -> None:
    deltas = Driver(tokenizer, stop=["END"]).run("the EN")
    assert text_of(deltas) == "the EN"
    assert deltas[-1].text == "EN" and deltas[-1].finish_reason == "length"


def test_min_tokens_holds_stop_strings_off(tokenizer: Tokenizer) -> None:
    """Ten tokens come whatever they spell; a match that ends in the eleventh counts."""
    driver = Driver(tokenizer, stop=["ab"], min_tokens=10)
    deltas = driver.run("abababababab")
    assert text_of(deltas) == "ababababab"
    assert sum(len(d.token_ids) for d in deltas) == 12
    assert Driver(tokenizer, stop=["ab"], min_tokens=2).run("ab" + "c")[-1].finish_reason == "length"
    begun = Driver(tokenizer, stop=["ab"], min_tokens=1).run("abc")
    assert (text_of(begun), begun[-1].stop_reason) == ("", "ab")


def test_eos_is_not_shown(tokenizer: Tokenizer) -> None:
    deltas = Driver(tokenizer, skip_special_tokens=False).run("hi", "stop")
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == ("hi", "stop", None)
    assert deltas[-1].token_ids == [tokenizer.eos_token_id]


def test_eos_is_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    fields = {"include_stop_str_in_output": True}
    assert text_of(Driver(tokenizer, skip_special_tokens=False, **fields).run("hi", "stop")) == "hi</s>"
    assert text_of(Driver(tokenizer, skip_special_tokens=True, **fields).run("hi", "stop")) == "hi"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_shown_only_when_asked_for(tokenizer: Tokenizer, include: bool) -> None:
    (dot,) = tokenizer.encode(".")
    deltas = Driver(tokenizer, include_stop_str_in_output=include).run("hi", "stop", stop_token=dot)
    assert text_of(deltas) == ("hi." if include else "hi")
    assert deltas[-1].stop_reason == dot


def test_the_text_before_a_hidden_stop_token_is_complete(tokenizer: Tokenizer) -> None:
    deltas = Driver(tokenizer, stop=["xyz"]).run(b"xy\xe2\x82", "stop")
    assert text_of(deltas) == "xy\ufffd"


def test_errors_and_aborts_pass_through(tokenizer: Tokenizer) -> None:
    driver = Driver(tokenizer)
    driver.run("hi", finish=None)
    delta, needs_abort = driver.processor.process(EngineOutput.failed("r", "non-finite logits"))
    assert delta is not None and not needs_abort
    assert (delta.finish_reason, delta.error, delta.text) == ("error", "non-finite logits", "")


def test_without_detokenising_there_is_no_text(tokenizer: Tokenizer) -> None:
    deltas = Driver(tokenizer, 2, detokenize=False).run("hello")
    assert text_of(deltas) == "" and [len(d.token_ids) for d in deltas] == [2, 2, 1]
    assert [text for d in deltas for text in d.token_texts] == [""] * 5


def test_prompt_logprobs_and_cached_tokens_pass_through(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add("r", 0, [1, 2], SamplingParams())
    entries = [TokenLogprobs(2, -1.0, 1, [], [])]
    delta, _ = processor.process(EngineOutput("r", [65], prompt_logprobs=entries, num_cached_tokens=7))
    assert delta is not None and delta.prompt_logprobs == entries and delta.num_cached_tokens == 7


def test_unknown_removed_and_silent_outputs(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    assert processor.process(EngineOutput("ghost", [1])) == (None, False)
    processor.add("r", 0, [], SamplingParams())
    assert processor.process(EngineOutput("r", [])) == (None, False)
    processor.remove("r")
    processor.remove("r")
    assert len(processor) == 0
    assert processor.process(EngineOutput("r", [1])) == (None, False)

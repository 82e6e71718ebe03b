"""One answer as the server reads it: flags to syntax, marks that are tokens, thoughts before calls, tokens counted."""

from __future__ import annotations

from typing import Any

import pytest

from halfbyte.config import ServerConfig
from halfbyte.engine.output_processor import OutputProcessor
from halfbyte.engine.tokenizer import Tokenizer
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.parser import AnswerSyntax
from halfbyte.entrypoints.answers.thought_tokens import ThoughtTokens
from halfbyte.errors import UserError
from halfbyte.types import EngineOutput, SamplingParams, Thinking
from tests.unit.tool_parsers.recorded import Meaning
from tests.unit.tool_parsers.token_marks import tokenizer_with

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ANSWER = '<think>\nTwo calls.\n</think>\n\nSure <x>.\n<tool_call>\n{"name": "f", "arguments": {"a": "é<x>"}}\n</tool_call>'


def make_syntax(tokenizer: Tokenizer, **flags: Any) -> AnswerSyntax:
    return AnswerSyntax(ServerConfig(**{"tool_call_parser": "hermes", "reasoning_parser": "qwen3"} | flags), tokenizer)


def read(syntax: AnswerSyntax, tokenizer: Tokenizer, text: str, params: SamplingParams, *, special: bool = False) -> Meaning:
    """The meaning of a generated text, token by token through the output processor, as a stream is read."""
    processor = OutputProcessor(tokenizer)
    processor.add("r", 0, [0], params, syntax.marks.by_token)
    parser = syntax.parser([], syntax.thinking("", continues=False), "", special=special)
    assert parser is not None
    meaning = Meaning()
    ids = tokenizer.encode(text, False)
    for place, token_id in enumerate(ids):
        ends = "length" if place == len(ids) - 1 else None
        delta, _ = processor.process(EngineOutput("r", [token_id], finish_reason=ends))
        if delta is not None:
            meaning.add(parser.feed(delta.text))
            if delta.finish_reason is not None:
                break
    return meaning.add(parser.finish())


@pytest.mark.parametrize("special", [(), MARKS], ids=["plain", "special"])
@pytest.mark.parametrize("added", [(), MARKS, (*MARKS, "<x>")], ids=["spelled", "tokens", "more tokens"])
@pytest.mark.parametrize("stop", [[], ["zzz", "<tool_call> "]], ids=["no stop", "stops"])
@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_means_the_same_however_its_marks_are_tokens(
    added: tuple[str, ...], special: tuple[str, ...], stop: list[str], skip: bool
) -> None:
    tokenizer = tokenizer_with(*added, special=special)
    syntax = make_syntax(tokenizer)
    meaning = read(syntax, tokenizer, ANSWER, SamplingParams(stop=stop, skip_special_tokens=skip), special=not skip)
    assert (meaning.reasoning, meaning.content, meaning.calls) == ("Two calls.", "Sure <x>.", [["f", '{"a": "é<x>"}']])


def test_a_mark_that_is_spelled_by_other_tokens_is_text() -> None:
    tokenizer = tokenizer_with(*MARKS, special=False)
    syntax = make_syntax(tokenizer, reasoning_parser=None)
    processor = OutputProcessor(tokenizer)
    processor.add("r", 0, [0], SamplingParams(), syntax.marks.by_token)
    parser = syntax.parser([], None, "", special=False)
    assert parser is not None
    spelled = [i for char in '<tool_call>{"name": "f"}</tool_call>' for i in tokenizer.encode(char, False)]
    delta, _ = processor.process(EngineOutput("r", spelled, finish_reason="length"))
    assert delta is not None
    meaning = Meaning().add(parser.feed(delta.text)).add(parser.finish())
    assert (meaning.content, meaning.calls) == ('<tool_call>{"name": "f"}</tool_call>', [])


@pytest.mark.parametrize(("special", "shown"), [(False, "a b"), (True, "a </think>b")])
def test_a_stray_mark_is_shown_as_control_tokens_are(special: bool, shown: str) -> None:
    tokenizer = tokenizer_with(*MARKS, special=MARKS)
    syntax = make_syntax(tokenizer)
    assert read(syntax, tokenizer, "a </think>b", SamplingParams(), special=special).content == shown


@pytest.mark.parametrize("stop", ["</tool_call>", "_call>", 'ol_call>\n{"name', '<tool_call>\n{"name": "f"'])
def test_a_stop_string_sees_the_text_of_marks(stop: str) -> None:
    text = 'a <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    plain, tokens = tokenizer_with(), tokenizer_with(*MARKS, special=False)
    for tokenizer in (plain, tokens):
        processor = OutputProcessor(tokenizer)
        marks = make_syntax(tokenizer).marks
        processor.add("r", 0, [0], SamplingParams(stop=[stop], max_tokens=99), marks.by_token)
        shown = ""
        for token_id in tokenizer.encode(text, False):
            delta, _ = processor.process(EngineOutput("r", [token_id]))
            assert delta is not None
            shown += delta.text
            if delta.finish_reason is not None:
                assert delta.stop_reason == stop
                break
        assert marks.plain(shown) == text[: text.index(stop)]


def test_held_marks_come_out_whole() -> None:
    """A stop string that begins inside a mark's text does not cut the mark in two."""
    tokenizer = tokenizer_with(*MARKS, special=False)
    marks = make_syntax(tokenizer).marks
    processor = OutputProcessor(tokenizer)
    processor.add("r", 0, [0], SamplingParams(stop=["call>!"]), marks.by_token)
    texts = []
    for token_id in tokenizer.encode("<tool_call>?", False):
        delta, _ = processor.process(EngineOutput("r", [token_id]))
        assert delta is not None
        texts.append(delta.text)
    assert texts == ["", marks.mark("<tool_call>") + "?"]


def test_thought_tokens_are_counted_by_their_ids() -> None:
    thinking = Thinking([1], [2, 3], [2, 3])
    for is_open, ids, expected in (
        (None, [1, 5, 2, 2, 3, 9], 5),
        (None, [5, 1, 2, 3], 0),
        (True, [5, 2, 3, 1], 3),
        (True, [5, 5], 2),
        (False, [1, 2, 3], 0),
    ):
        counter = ThoughtTokens(Thinking([1], [2, 3], [2, 3], is_open=is_open))
        assert sum(counter.count([i]) for i in ids) == expected
        assert ThoughtTokens(Thinking([1], [2, 3], [2, 3], is_open=is_open)).count(ids) == expected
    assert ThoughtTokens(Thinking([1, 4], [2], [2])).count([1, 4, 7, 2, 8]) == 4
    assert ThoughtTokens(thinking).count([]) == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"tool_call_parser": "nonsense"}, "--tool-call-parser"),
        ({"reasoning_parser": "nonsense"}, "--reasoning-parser"),
        ({"tool_call_parser": None, "enable_auto_tool_choice": True}, "--enable-auto-tool-choice"),
        ({"reasoning_parser": None, "reasoning_config": {"reasoning_end_str": "x"}}, "--reasoning-config"),
        ({"tool_call_parser": "json", "reasoning_config": {"tool_calls_end_reasoning": True}}, "tool_calls_end_reasoning"),
        ({"tool_call_parser": None, "reasoning_config": {"tool_calls_end_reasoning": True}}, "tool_calls_end_reasoning"),
        ({"tool_call_parser": "kimi_k2"}, "vocabulary has no token"),
        ({"tool_call_parser": "hf"}, "response_template"),
        ({"tool_call_parser": "hermes", "reasoning_parser": "gpt_oss"}, "vocabulary has no token|cannot read the same answer"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make_syntax(tokenizer_with(), **flags)


def test_marks_are_configurable() -> None:
    config = {"reasoning_start_str": "[[plan]]", "reasoning_end_str": "[[/plan]]"}
    syntax = make_syntax(tokenizer_with(), reasoning_parser="think", reasoning_config=config)
    parser = syntax.parser(None, syntax.thinking("[[plan]]", continues=False), "", special=False)
    assert parser is not None
    meaning = Meaning().add(parser.feed("a[[/plan]]b")).add(parser.finish())
    assert (meaning.reasoning, meaning.content) == ("a", "b")


def test_marks_are_one_character_each_and_spelled_out_again() -> None:
    tokenizer = tokenizer_with(*MARKS, '<|"|>', special=MARKS)
    marks = Marks(tokenizer)
    assert marks.mark("</s>") == "</s>" and len(marks.mark("<think>")) == 1 == len(marks.mark('<|"|>'))
    text = marks.mark("<think>") + "é" + marks.mark('<|"|>')
    assert marks.plain(text) == '<think>é<|"|>' and marks.plain(text, special=False) == 'é<|"|>'
    assert marks.plain_json(text) == '<think>é<|\\"|>'
    assert marks.terminal("</s>") == '"</s>"' and marks.terminal("<think>") == f"<[{tokenizer.token_id('<think>')}]>"

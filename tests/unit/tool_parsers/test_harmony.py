"""Answers of gpt-oss: thoughts, calls and text in harmony's channels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halfbyte.engine.grammar.compile import GrammarCompiler
from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.grammar import tools_grammar
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.answers.parser import AnswerParser, Whole
from halfbyte.entrypoints.tool_parsers.harmony import ANSWER_BEGINS, Harmony
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Meaning, Recorded, read
from tests.unit.tool_parsers.token_marks import EOS, tokenizer_with

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
THOUGHT = "<|channel|>analysis<|message|>Need <f>.\n\nNow.<|end|><|start|>assistant"
PARSERS = ["openai", "gpt_oss"]
CASES = [
    Recorded(
        "thoughts and an answer",
        THOUGHT + "<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        content="2 + 2 = 4.",
        reasoning="Need <f>.\n\nNow.",
    ),
    Recorded(
        "no thoughts, a type in the header, no mark at the end",
        '<|channel|>final <|constrain|>json<|message|>{"a": "🌧"}\n',
        content='{"a": "🌧"}\n',
    ),
    Recorded(
        "one call",
        THOUGHT
        + '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Zürich", "days": 3}<|call|>',
        reasoning="Need <f>.\n\nNow.",
        calls=[("get_weather", '{"city": "Zürich", "days": 3}')],
    ),
    Recorded(
        "the recipient before the channel, the type without its mark",
        THOUGHT + ' to=functions.f<|channel|>commentary json<|message|>{"a": {"b": [1, null]}}',
        reasoning="Need <f>.\n\nNow.",
        calls=[("f", '{"a": {"b": [1, null]}}')],
    ),
    Recorded(
        "a preamble, two calls, the first without arguments",
        THOUGHT + "<|channel|>commentary<|message|>Plan:\n1. look<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}<|call|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}<|call|>',
        content="Plan:\n1. look",
        reasoning="Need <f>.\n\nNow.",
        calls=[("now", "{}"), ("add", '{"x": 1}')],
    ),
    Recorded(
        "marks inside a string",
        '<|channel|>commentary to=functions.f json<|message|>{"a": "<|call|> {\\"<|end|>"}<|call|>',
        calls=[("f", '{"a": "<|call|> {\\"<|end|>"}')],
    ),
    Recorded(
        "tools of the model's own, one that takes no JSON",
        '<|channel|>analysis to=browser.search code<|message|>{"query": "a"}<|call|>'
        '<|start|>assistant<|channel|>analysis to=python code<|message|>print("é")\n<|call|>',
        calls=[("browser.search", '{"query": "a"}'), ("python", '{"input": "print(\\"é\\")\\n"}')],
    ),
    Recorded(
        "end marks forgotten, thoughts in two messages, a channel that nobody knows",
        "<|channel|>analysis<|message|>one<|start|>assistant<|channel|>analysis<|message|>two<|channel|>poetry<|message|>Ode"
        "<|start|>assistant<|message|>no channel",
        content="Ode\nno channel",
        reasoning="one\ntwo",
    ),
    Recorded(
        "a call whose object is not closed, then text",
        '<|channel|>commentary to=functions.f json<|message|>{"a": [1<|call|><|start|>assistant<|channel|>final<|message|>ok',
        content="ok",
        calls=[("f", '{"a": [1')],
    ),
    Recorded("no message at all", "Hello <there>", content="Hello <there>"),
    Recorded(
        "white space between messages",
        THOUGHT + "<|channel|>commentary<|message|>a<|end|>\n <|start|>assistant<|channel|>final<|message|>b",
        content="a\nb",
        reasoning="Need <f>.\n\nNow.",
    ),
    Recorded("ended in a header", THOUGHT + "<|channel|>comment", reasoning="Need <f>.\n\nNow."),
    Recorded("ended in a recipient", "<|channel|>commentary to=functions.get"),
]
RECORDED = dict.fromkeys(PARSERS, CASES)

TOKENIZER = tokenizer_with(*MARKS)


def with_tokens(text: str, **options: Any) -> Meaning:
    """What is told of an answer in which every mark that is spelled is a token."""
    marks = Marks(TOKENIZER)
    syntax = Harmony(marks)
    options = {"calls": True, "reasoning": True, "prompt": ANSWER_BEGINS, **options}
    parser = AnswerParser(marks, None, syntax.whole_reader([], **options), special=False)
    for mark in MARKS:
        text = text.replace(mark, marks.mark(mark)).replace(mark.replace("|", "¦"), mark)
    return read(parser, text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_marks_that_are_tokens_mean_what_spelled_ones_mean_elsewhere(case: Recorded) -> None:
    meaning = with_tokens(case.text)
    assert (meaning.content, meaning.reasoning) == (case.content, case.reasoning)
    assert [tuple(call) for call in meaning.calls] == list(case.calls)


def test_a_mark_that_is_only_spelled_is_text_where_it_is_a_token() -> None:
    meaning = with_tokens(
        "<|channel|>analysis<|message|>say <¦end¦><¦start¦><|end|><|start|>assistant<|channel|>final<|message|><¦call¦>!"
    )
    assert (meaning.reasoning, meaning.content, meaning.calls) == ("say <|end|><|start|>", "<|call|>!", [])


def test_without_calls_what_a_tool_is_sent_is_content() -> None:
    text = '<|channel|>commentary to=functions.f json<|message|>{"a": 1}<|call|>'
    assert with_tokens(text, calls=False) == Meaning(content='{"a": 1}')


def test_without_reasoning_thoughts_are_content_on_lines_of_their_own() -> None:
    meaning = with_tokens(THOUGHT + "<|channel|>final<|message|>4", reasoning=False)
    assert (meaning.content, meaning.reasoning) == ("Need <f>.\n\nNow.\n4", "")


@pytest.mark.parametrize(
    ("prompt", "is_open", "content", "reasoning"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", None, "on\n4", ""),
        ("<|end|><|start|>assistant<|channel|>final<|message|>Go ", False, "on\n4", ""),
        ("<|end|><|start|>assistant<|channel|>analysis<|message|>Go ", True, "4", "on"),
        ("<|start|>user<|message|>Hi<|end|>", None, "on\n4", ""),
        ("no harmony", None, "on\n4", ""),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(prompt: str, is_open: bool | None, content: str, reasoning: str) -> None:
    assert Harmony(Marks()).is_open(prompt, continues=True) is is_open
    told = with_tokens("on<|end|><|start|>assistant<|channel|>final<|message|>4", prompt=prompt)
    assert (told.content, told.reasoning) == (content, reasoning)


def test_a_prompt_with_an_open_header_is_gone_on_with() -> None:
    prompt = "<|start|>assistant<|channel|>final"
    assert with_tokens("<|message|>4", prompt=prompt) == Meaning(content="4")


def test_a_header_without_an_end_is_text_after_all() -> None:
    text = "<|channel|>analysis " + "so " * 1000
    assert read(Harmony(Marks()).reader([]), [text]).content == text.rstrip() + " "
    assert read(Harmony(Marks()).reader([]), text).content == text.rstrip() + " "


def test_another_models_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="gpt-oss"):
        Harmony(Marks(tokenizer_with("<|start|>", "<|end|>")))


def test_it_is_a_syntax_of_whole_answers() -> None:
    assert isinstance(Harmony(Marks()), Whole)


def json_term(schema: Any) -> str:
    return "%json " + json.dumps(schema)


def allows(lark: str, text: str) -> bool:
    eos = TOKENIZER.token_id(EOS)
    assert eos is not None
    matcher = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, [eos]).matcher(lark)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def test_the_grammar_of_calls_begins_where_the_thought_is_closed() -> None:
    marks = Marks(TOKENIZER)
    syntax = Harmony(marks)
    assert syntax.marks.closing == "<|end|><|start|>assistant"
    assert syntax.marks.forced == syntax.marks.closing + "<|channel|>final<|message|>"
    assert (syntax.marks.opening + "x" + syntax.marks.closing + call("f", "{}")).startswith(
        "<|channel|>analysis<|message|>x<|end|>"
    )
    tools = [Tool("f"), Tool("g", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})]
    one, many = (tools_grammar(syntax, marks, tools, json_term, required=True, parallel=parallel) for parallel in (False, True))
    assert allows(one, call("f", "{}")) and allows(one, call("g", '{"n": 1}') + "<|call|>")
    assert not allows(one, call("h", "{}")) and not allows(one, call("g", "{}"))
    both = call("f", "{}") + "<|call|><|start|>assistant" + call("g", '{"n": 2}')
    assert allows(many, both) and not allows(one, both)
    assert with_tokens(both).calls == [["f", "{}"], ["g", '{"n": 2}']]


def test_a_model_that_may_choose_answers_in_the_final_channel() -> None:
    marks = Marks(TOKENIZER)
    final = "<|channel|>final<|message|>"
    text, data = (
        tools_grammar(Harmony(marks), marks, [Tool("f")], json_term, required=False, parallel=True, or_else=or_else)
        for or_else in (None, '%json {"type": "integer"}')
    )
    for grammar in (text, data):
        assert allows(grammar, call("f", "{}")) and not allows(grammar, call("h", "{}")) and not allows(grammar, "Hi")
    assert allows(text, f"{final}Hi") and allows(text, final) and not allows(data, f"{final}Hi")
    assert allows(data, f"{final}12")


def test_a_final_message_is_held_to_the_grammar_within() -> None:
    syntax = Harmony(Marks(TOKENIZER))
    lark = syntax.final_grammar('start: "{" start "}" | %json {"type": "integer"} | other\nother: "start"')
    for text, is_allowed in (("{{12}}", True), ("start", True), ("{", False), ("x", False)):
        assert allows(lark, f"<|channel|>final<|message|>{text}") is is_allowed, text
    assert not allows(lark, "12")

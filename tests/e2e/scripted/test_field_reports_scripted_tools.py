"""What operators report of tool calls and thoughts (rows B01 to B14, B41, B52, F15 to F19, G04), over HTTP.

The text of every answer is known, so that what is told of it can be compared to the letter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers import TOOL_PARSERS
from tests.e2e.chat_answers import Told, told_both
from tests.unit.tool_parsers.recorded import Recorded
from tests.unit.tool_parsers.test_conformance import NEEDS_CONFIGURATION, recorded

Server = Any
CHAT = "/v1/chat/completions"
LONG = {"max_model_len": 4096}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


WEATHER, CLOCK = tool("weather", city={"type": "string"}), tool("clock")
NAMED = {"type": "function", "function": {"name": "weather"}}


def call(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


OSLO = call("weather", {"city": "Oslo"})


def ask(server: Server, answer: str | list[int], **fields: Any) -> Told:
    """What is told of an answer, whole and streamed alike."""
    messages = server.say_chat("?", answer)
    (told,) = told_both(partial(server.post, CHAT), {"messages": messages, "tools": [WEATHER, CLOCK]} | fields)
    return told


@pytest.fixture(scope="module")
def hermes(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info=LONG, tool_call_parser="hermes", enable_auto_tool_choice=True)


@pytest.fixture(scope="module")
def thinker(start_scripted: Callable[..., Server]) -> Server:
    return start_scripted(info=LONG, tool_call_parser="hermes", enable_auto_tool_choice=True, reasoning_parser="qwen3")


# --- every parser ------------------------------------------------------------------------------------------------------


class WantedTokens(Marks):
    """Remembers which tokens a syntax cannot do without."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[str] = []

    def require(self, syntax: str, *texts: str) -> None:
        self.wanted.extend(texts)


def wanted_tokens(parser: str) -> Sequence[str]:
    module, _, name = TOOL_PARSERS[parser].partition(":")
    marks = WantedTokens()
    getattr(import_module(module), name)(marks)
    return list(dict.fromkeys(marks.wanted))


@dataclass
class OfParser:
    """A server with one parser, and answers in its syntax that hold calls."""

    server: Server
    cases: list[Recorded]

    def ask(self, case: Recorded, **fields: Any) -> Told:
        tools = [
            {"type": "function", "function": {"name": t.name, "parameters": dict(t.parameters), "strict": t.strict}}
            for t in case.tools
        ]
        return ask(self.server, case.text, tools=tools or [tool("unused")], **fields)


def is_complete(case: Recorded) -> bool:
    try:
        return all(isinstance(json.loads(arguments), dict) for _, arguments in case.calls)
    except ValueError:
        return False


CASES = [(parser, case) for parser, _, case in recorded() if case.calls]
PARSERS = sorted({parser for parser, _ in CASES} - NEEDS_CONFIGURATION)


@pytest.fixture(scope="module", params=PARSERS)
def of_parser(request: pytest.FixtureRequest, start_scripted: Callable[..., Server]) -> Iterator[OfParser]:
    server = start_scripted(
        info=LONG, marks=wanted_tokens(request.param), tool_call_parser=request.param, enable_auto_tool_choice=True
    )
    yield OfParser(server, [case for parser, case in CASES if parser == request.param])
    server.stop()


def test_b02_a_call_that_is_cut_ends_like_any_answer(of_parser: OfParser) -> None:
    """Every parser, ended at some ten tokens of an answer: a normal last chunk, and the same whole and streamed.

    Arguments are the beginning of the whole ones, or an object in which members are missing.
    """
    case = max(of_parser.cases, key=lambda case: len(case.calls))
    whole = of_parser.ask(case)
    count = len(of_parser.server.tokens(case.text, special=False))
    for limit in range(1, count + 1, max(1, count // 10)):
        cut = of_parser.ask(case, max_tokens=limit)
        assert cut.finish_reason == "length"
        assert len(cut.calls) <= len(whole.calls)
        for begun, complete in zip(cut.calls, whole.calls, strict=False):
            assert begun[0] == complete[0]
            assert complete[1].startswith(begun[1]) or json.loads(begun[1]).items() <= json.loads(complete[1]).items()


def test_b09_pieces_of_arguments_join_to_the_whole_ones(of_parser: OfParser) -> None:
    """Every recorded answer of every parser, token by token, gives whole JSON; `told_both` sees to it that a name comes once."""
    for case in filter(is_complete, of_parser.cases):
        told = of_parser.ask(case)
        assert told.calls == list(case.calls), case.name
        assert told.finish_reason == "tool_calls"


# --- a call that is cut ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_b01_a_call_cut_by_max_tokens_finishes_with_length(hermes: Server, choice: Any) -> None:
    text, arguments = OSLO, '{"city": "Oslo"}'
    for limit in range(1, len(text) + 1):
        told = ask(hermes, text, tool_choice=choice, max_tokens=limit)
        assert told.finish_reason == "length"
        assert all(name == "weather" and arguments.startswith(part) for name, part in told.calls)
    assert told.calls == [("weather", arguments)]
    complete = ask(hermes, text, tool_choice=choice, max_tokens=len(text) + 1)
    assert complete.finish_reason == ("stop" if choice is NAMED else "tool_calls") and complete.calls == told.calls


def test_f15_nothing_of_an_unclosed_call_is_dropped(hermes: Server) -> None:
    """What came of it is content where no call can be told of it yet, and the beginning of a call's arguments otherwise."""
    arguments_at, arguments_end = OSLO.index('{"city"'), OSLO.index("}") + 1
    for limit in range(2, len(OSLO), 3):
        told = ask(hermes, OSLO, max_tokens=limit)
        assert told.finish_reason == "length"
        if told.calls:
            assert told.calls == [("weather", OSLO[arguments_at : min(limit, arguments_end)])]
            assert "</tool_call>".startswith(told.content)
        else:
            assert told.content == OSLO[:limit] and limit <= arguments_at


# --- arguments ---------------------------------------------------------------------------------------------------------


def test_b10_a_call_behind_one_without_arguments_keeps_its_own(hermes: Server) -> None:
    for empty in ("{}", "{ }", "null", '""'):
        text = f'<tool_call>\n{{"name": "clock", "arguments": {empty}}}\n</tool_call>\n' + call("weather", {"city": "Oslo"})
        told = ask(hermes, text)
        assert [(name, json.loads(arguments)) for name, arguments in told.calls] == [("clock", {}), ("weather", {"city": "Oslo"})]


def test_b11_a_call_without_arguments_has_an_empty_object(hermes: Server) -> None:
    for rest in ("", ', "arguments": {}', ', "arguments": null', ', "arguments": ""', ', "parameters": {}'):
        told = ask(hermes, f'<tool_call>\n{{"name": "clock"{rest}}}\n</tool_call>')
        assert told.calls == [("clock", "{}")], rest


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic", "json"])
def test_f17_white_space_of_a_text_is_kept(start_scripted: Callable[..., Server], parser: str) -> None:
    write: dict[str, Callable[[str], str]] = {
        "hermes": lambda value: call("weather", {"city": value}),
        "qwen3_coder": lambda value: (
            f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
        ),
        "pythonic": lambda value: f"[weather(city={value!r})]",
        "json": lambda value: json.dumps({"name": "weather", "parameters": {"city": value}}),
    }
    server = start_scripted(info=LONG, marks=wanted_tokens(parser), tool_call_parser=parser, enable_auto_tool_choice=True)
    for value in ("  x\n", "\n", "\t", " ", "a\r\n", "\n\n  def f():\n\n"):
        told = ask(server, write[parser](value))
        assert [(name, json.loads(arguments)) for name, arguments in told.calls] == [("weather", {"city": value})]
    server.stop()


# --- choices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_b12_forced_calls_stream(hermes: Server, choice: Any) -> None:
    """And the engine is given a grammar that leaves the model nothing but a call of the tools that may be called."""
    told = ask(hermes, OSLO, tool_choice=choice)
    assert told.calls == [("weather", '{"city": "Oslo"}')] and told.content == ""
    for request in hermes.model.requests[-2:]:
        grammar = request.constraint.grammar
        assert "weather" in grammar and ("clock" in grammar) == (choice == "required")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop"), ("none", "stop")],
    ids=["auto", "required", "named", "none"],
)
def test_b13_finish_reasons_are_openais(hermes: Server, choice: Any, reason: str) -> None:
    told = ask(hermes, OSLO, tool_choice=choice)
    assert told.finish_reason == reason and bool(told.calls) == (choice != "none")
    assert ask(hermes, "No call.").finish_reason == "stop"


@pytest.mark.parametrize(
    ("text", "stop", "content", "calls"),
    [
        ('Here: {"a": 1} done', "}", 'Here: {"a": 1', []),
        ('a <tool_call>{"na', '{"na', "a <tool_call>", []),
        ("a <tool_call>{}", "}", "a <tool_call>{", []),
        ("ends like a stop: }}", "}}}", "ends like a stop: }}", []),
        ("ends like a mark: <tool_", "zzz", "ends like a mark: <tool_", []),
        ("ends like both: <tool_", "tool_z", "ends like both: <tool_", []),
        (f"Look. {OSLO}", "}", "Look.", [("weather", '{"city": "Oslo"')]),
        (f"Look. {OSLO}", "</tool_call>", "Look.", [("weather", '{"city": "Oslo"}')]),
    ],
)
def test_b14_a_stop_string_swallows_no_text(
    hermes: Server, text: str, stop: str, content: str, calls: list[tuple[str, str]]
) -> None:
    told = ask(hermes, text, stop=[stop])
    assert (told.content.rstrip(), told.calls) == (content, calls)
    assert told.stop_reason == (stop if stop in text else None)


def test_the_client_of_openai_sees_calls_whole_and_streamed(hermes: Server) -> None:
    messages = hermes.say_chat("client", OSLO)
    create: Any = hermes.client().chat.completions.create
    body = {"model": "scripted", "messages": messages, "tools": [WEATHER]}
    message = create(**body).choices[0].message
    assert message.content is None and message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    pieces = [c for chunk in create(**body, stream=True) for c in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].id.startswith("chatcmpl-tool-") and pieces[0].function.name == "weather"
    assert "".join(piece.function.arguments or "" for piece in pieces) == '{"city": "Oslo"}'


# --- marks and thoughts ------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nA call is due.\n</think>\n\n"


@pytest.mark.parametrize("kind", ["spelled", "tokens", "special tokens"])
@pytest.mark.parametrize("skip", [True, False])
def test_b52_marks_are_read_before_special_tokens_are_left_out(
    start_scripted: Callable[..., Server], kind: str, skip: bool
) -> None:
    """No mark leaks into content, and without a choice of tools there is no call."""
    server = start_scripted(
        info=LONG,
        marks=() if kind == "spelled" else MARKS,
        special=kind == "special tokens",
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        reasoning_parser="qwen3",
    )
    for thought, reasoning in (("", ""), (THOUGHT, "A call is due.")):
        told = ask(server, thought + OSLO, skip_special_tokens=skip)
        assert told == Told("", reasoning, [("weather", '{"city": "Oslo"}')], "tool_calls")
        uncalled = ask(server, thought + OSLO, skip_special_tokens=skip, tool_choice="none")
        hidden = kind == "special tokens" and skip
        shown = OSLO.replace("<tool_call>", "").replace("</tool_call>", "") if hidden else OSLO
        assert (uncalled.reasoning, uncalled.calls, uncalled.finish_reason) == (reasoning, [], "stop")
        assert uncalled.content.strip() == shown.strip()
    server.stop()


def test_f16_a_mark_that_is_only_spelled_is_text(start_scripted: Callable[..., Server]) -> None:
    """Where the vocabulary has a token for it: the model quotes the mark letter by letter."""
    server = start_scripted(info=LONG, marks=MARKS, tool_call_parser="hermes", enable_auto_tool_choice=True)
    quoted = f"Write {OSLO} for a call."
    letters = [token for letter in quoted for token in server.tokens(letter, special=False)]
    assert ask(server, letters) == Told(quoted, "", [], "stop")
    assert ask(server, quoted).calls == [("weather", '{"city": "Oslo"}')]
    server.stop()


CALLING_THOUGHT = f"<think>\nI do {OSLO} now.\n</think>\n\nDone."


def test_f19_a_call_inside_a_thought_is_part_of_it(thinker: Server) -> None:
    assert ask(thinker, CALLING_THOUGHT) == Told("Done.", f"I do {OSLO} now.", [], "stop")


def test_f19_a_call_ends_a_thought_where_the_operator_says_so(start_scripted: Callable[..., Server]) -> None:
    server = start_scripted(
        info=LONG,
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
        reasoning_parser="qwen3",
        reasoning_config={"tool_calls_end_reasoning": True},
    )
    told = ask(server, f"<think>\nI do {OSLO}")
    server.stop()
    assert told == Told("", "I do", [("weather", '{"city": "Oslo"}')], "tool_calls")


def test_hidden_thoughts_are_only_hidden(thinker: Server) -> None:
    shown, hidden = (ask(thinker, THOUGHT + OSLO, include_reasoning=include) for include in (True, False))
    assert shown.reasoning and hidden == Told("", "", shown.calls, shown.finish_reason)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ('<think>\nHm.\n</think>\n\n{"a": 1}', "Hm.", '{"a": 1}'),
        ('{"a": 1}', "", '{"a": 1}'),
        ('So. <think>Hm.</think>{"a": 1}', "", 'So. <think>Hm.</think>{"a": 1}'),
    ],
)
def test_b41_json_and_thoughts_go_together(thinker: Server, text: str, reasoning: str, content: str) -> None:
    """The engine is given the grammar and the marks of thoughts. Text before a thought is content, and keeps to the grammar."""
    told = ask(thinker, text, tools=None, response_format={"type": "json_object"})
    assert (told.reasoning, told.content) == (reasoning, content)
    constraint = thinker.model.requests[-1].constraint
    assert constraint.grammar is not None and constraint.thinking.is_open is None
    assert thinker.tokens("<think>", special=False) == constraint.thinking.start_ids


# --- a syntax in a file ------------------------------------------------------------------------------------------------


def test_g04_a_syntax_from_a_file(start_scripted: Callable[..., Server], tmp_path: Path) -> None:
    config = {"open": "[[", "name": "use (?P<name>[\\w.]+): ", "arguments": "json", "close": "]]"}
    (tmp_path / "syntax.json").write_text(json.dumps(config))
    server = start_scripted(info=LONG, tool_call_parser=f"regex:{tmp_path / 'syntax.json'}", enable_auto_tool_choice=True)
    told = ask(server, 'Now. [[use weather: {"city": "Oslo"}]]')
    forced = ask(server, '[[use weather: {"city": "Oslo"}]]', tool_choice="required")
    server.stop()
    assert (told.content.strip(), told.calls, told.finish_reason) == ("Now.", [("weather", '{"city": "Oslo"}')], "tool_calls")
    assert forced.calls == told.calls

"""Answers in Mistral's three syntaxes."""

from __future__ import annotations

import pytest

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.mistral import Mistral
from halfbyte.errors import UserError
from tests.unit.tool_parsers.recorded import Recorded, read
from tests.unit.tool_parsers.token_marks import tokenizer_with

PARSER = "mistral"
RECORDED = [
    Recorded(
        "one call",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich 🌧", "days": 3}',
        calls=[("get_weather", '{"city": "Zürich 🌧", "days": 3}')],
        call_ids=[None],
    ),
    Recorded(
        "text, two calls with ids, the first without arguments",
        'I look.[TOOL_CALLS]now[CALL_ID]aB3dE6gH9[ARGS]{}[TOOL_CALLS]add[CALL_ID]000000001[ARGS]{"x": [{"y": null}]}',
        content="I look.",
        calls=[("now", "{}"), ("add", '{"x": [{"y": null}]}')],
        call_ids=["aB3dE6gH9", "000000001"],
    ),
    Recorded(
        "quotes and marks inside a string",
        '[TOOL_CALLS]write[ARGS]{"text": "[TOOL_CALLS]f[ARGS]{ \\"q\\""}',
        calls=[("write", '{"text": "[TOOL_CALLS]f[ARGS]{ \\"q\\""}')],
    ),
    Recorded(
        "without a mark of arguments, spaces between",
        '[TOOL_CALLS] f {"a": 1}\n[TOOL_CALLS]g{}',
        calls=[("f", '{"a": 1}'), ("g", "{}")],
    ),
    Recorded(
        "an array",
        'Well. [TOOL_CALLS] [{"name": "f", "arguments": {"a": "é ]"}}, {"name": "g", "arguments": {}, "id": "aB3dE6gH9"}]',
        content="Well.",
        calls=[("f", '{"a": "é ]"}'), ("g", "{}")],
        call_ids=[None, None],
    ),
    Recorded("an array of another order", '[TOOL_CALLS][{"arguments": {"a": 1}, "name": "f"}]', calls=[("f", '{"a": 1}')]),
    Recorded("an object", '[TOOL_CALLS]{"name": "f", "arguments": "{\\"a\\": 1}"}', calls=[("f", '{"a": 1}')]),
    Recorded("cut in the arguments", '[TOOL_CALLS]f[ARGS]{"a": [1, 2', calls=[("f", '{"a": [1, 2')]),
    Recorded("cut in the name", "[TOOL_CALLS]get_wea", content="[TOOL_CALLS]get_wea"),
    Recorded("no call", "[TOOL_CALLS][1] [TOOL_CALLS][ARGS]{}", content="[TOOL_CALLS][1] [TOOL_CALLS][ARGS]{}"),
    Recorded("text", "The list [TOOL_CALL]", content="The list [TOOL_CALL]"),
]


def test_a_vocabulary_without_the_mark_is_refused() -> None:
    with pytest.raises(UserError, match=r"--tool-call-parser mistral does not fit this model.*\[TOOL_CALLS\]"):
        Mistral(Marks(tokenizer_with()))


def test_the_vocabulary_decides_which_syntax_a_grammar_asks_for() -> None:
    def rules(*tokens: str) -> str:
        syntax = Mistral(Marks(tokenizer_with(*tokens)))
        return syntax.grammar([Tool("f")], lambda schema: "JSON", parallel=True).rules

    assert '"["' in rules("[TOOL_CALLS]")
    assert '"["' not in rules("[TOOL_CALLS]", "[ARGS]") and "{9}" not in rules("[TOOL_CALLS]", "[ARGS]")
    assert "{9}" in rules("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def test_a_spelled_mark_is_content_and_ends_nothing() -> None:
    marks = Marks(tokenizer_with("[TOOL_CALLS]", "[ARGS]"))
    syntax = Mistral(marks)
    assert read(syntax.reader([]), ["a [TOOL_CALLS]f[ARGS]{}"]).content == "a [TOOL_CALLS]f[ARGS]{}"
    written = f'{marks.mark("[TOOL_CALLS]")}f{marks.mark("[ARGS]")}{{"a": "[TOOL_CALLS]"}}'
    assert read(syntax.reader([]), written).calls == [["f", '{"a": "[TOOL_CALLS]"}']]

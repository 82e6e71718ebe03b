"""Answers whose calls are bare JSON: `json`, `xlam`, and Llama's two names."""

from __future__ import annotations

import pytest

from halfbyte.entrypoints.answers.events import Tool
from halfbyte.entrypoints.answers.marks import Marks
from halfbyte.entrypoints.tool_parsers.json_answers import JsonAnswer
from halfbyte.entrypoints.tool_parsers.llama3_json import Llama3Json
from tests.unit.tool_parsers.recorded import Recorded, read

PARSERS = ["json", "llama3_json", "llama4_json", "xlam"]
TOOLS = [Tool("get_weather"), Tool("now"), Tool("write")]

WHOLE = [
    Recorded(
        "one object",
        '{"name": "get_weather", "arguments": {"city": "Zürich 🌧", "days": 3}}',
        calls=[("get_weather", '{"city": "Zürich 🌧", "days": 3}')],
        tools=TOOLS,
    ),
    Recorded(
        "an array of two, white space around",
        '\n [{"name": "now", "arguments": {}},\n '
        '{"name": "write", "arguments": {"text": "]}, [{ \\"x\\" ```", "at": [{"x": []}]}}]\n',
        calls=[("now", "{}"), ("write", '{"text": "]}, [{ \\"x\\" ```", "at": [{"x": []}]}')],
        tools=TOOLS,
    ),
    Recorded(
        "in a fence, with a word behind it",
        '```json\n[{"name": "now"}]\n```\nDone.',
        content="Done.",
        calls=[("now", "{}")],
        tools=TOOLS,
    ),
    Recorded(
        "without commas between, without an end",
        '[{"name": "now", "arguments": {}} {"name": "now", "arguments": {"zone": "UTC"}}',
        calls=[("now", "{}"), ("now", '{"zone": "UTC"}')],
        tools=TOOLS,
    ),
    Recorded("text", "Hello {you}", content="Hello {you}", tools=TOOLS),
    Recorded(
        "a call behind text is text",
        'Like so: {"name": "now", "arguments": {}}',
        content='Like so: {"name": "now", "arguments": {}}',
        tools=TOOLS,
    ),
    Recorded("no tool of the request", ' {"name": "Ann", "age": 3}', content=' {"name": "Ann", "age": 3}', tools=TOOLS),
    Recorded("other JSON", '[1, {"name": "now"}]', content='[1, {"name": "now"}]', tools=TOOLS),
    Recorded("a fence of something else", "```json\n[1]\n```\n", content="```json\n[1]\n```\n", tools=TOOLS),
    Recorded(
        "what follows the first call is none",
        '[{"name": "now", "arguments": {}}, {"name": "Ann"}]',
        content=', {"name": "Ann"}]',
        calls=[("now", "{}")],
        tools=TOOLS,
    ),
]
LLAMA = [
    Recorded(
        "one call",
        '{"name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}',
        calls=[("get_weather", '{"city": "Oslo", "days": 3}')],
        tools=TOOLS,
    ),
    Recorded(
        "a type in front, two calls",
        '{"type": "function", "name": "now", "parameters": {}}; {"name": "write", "parameters": {"text": "a; b {\\"é\\"} 🌧"}}',
        calls=[("now", "{}"), ("write", '{"text": "a; b {\\"é\\"} 🌧"}')],
        tools=TOOLS,
    ),
    Recorded(
        "joined by a new line, then text",
        '\n{"name": "now", "parameters": {}}\n\n{"name": "now", "arguments": {"zone": [["UTC"], {"x": null}]}} ok',
        content="ok",
        calls=[("now", "{}"), ("now", '{"zone": [["UTC"], {"x": null}]}')],
        tools=TOOLS,
    ),
    Recorded(
        "with the tag, behind text, of any name",
        'I look. <|python_tag|>{"name": "elsewhere", "parameters": {"q": "<|python_tag|>"}}; {"name": "now"}',
        content="I look.",
        calls=[("elsewhere", '{"q": "<|python_tag|>"}'), ("now", "{}")],
        tools=TOOLS,
    ),
    Recorded(
        "between the marks of Llama 4",
        '<|python_start|>{"name": "now", "parameters": null}<|python_end|>',
        calls=[("now", "{}")],
        tools=TOOLS,
    ),
    Recorded("a built-in tool is text", "<|python_tag|>search.call(q=1)", content="<|python_tag|>search.call(q=1)", tools=TOOLS),
    Recorded(
        "no tool of the request", '{"name": "Ann"}; {"name": "now"}', content='{"name": "Ann"}; {"name": "now"}', tools=TOOLS
    ),
    Recorded("text", "Hello {you}; so", content="Hello {you}; so", tools=TOOLS),
]
MARKED = [
    Recorded("behind a mark", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', calls=[("now", "{}")], tools=TOOLS),
    Recorded("between tags", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', calls=[("now", "{}")], tools=TOOLS),
]
RECORDED = {"json": WHOLE, "xlam": WHOLE + MARKED, "llama3_json": LLAMA, "llama4_json": LLAMA[:5]}


@pytest.mark.parametrize("kind", [JsonAnswer, Llama3Json])
def test_an_answer_in_json_streams_as_soon_as_it_is_no_call(kind: type[JsonAnswer]) -> None:
    begun = read(kind(Marks()).reader(TOOLS), ['{"users": [{"name": "now"'], finish=False)
    assert begun.content == '{"users": [{"name": "now"' and not begun.calls


@pytest.mark.parametrize("kind", [JsonAnswer, Llama3Json])
def test_arguments_stream_from_the_first_letter_on(kind: type[JsonAnswer]) -> None:
    begun = read(kind(Marks()).reader(TOOLS), ['{"name": "write", "parameters": {"text": "Onc'], finish=False)
    assert begun.calls == [["write", '{"text": "Onc']]
